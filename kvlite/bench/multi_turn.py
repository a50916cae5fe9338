"""Turns read for choices of which some recall: from the host store, as in a conversation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kvlite.bench.fork import Branch, Choice, read_once
from kvlite.engine.prefill import prefill
from kvlite.methods.layer_policy import layer_policies, loses
from kvlite.model.load import LoadedModel
from kvlite.offload import HostKVStore


def parties(choices: Sequence[Choice]) -> list[list[int]]:
    """Choices, as indices, in groups that need one host store each, those that recall nothing in
    the
    first: those in one read alike. A host store holds all that was read, so there should never be
        two
    at a time."""
    plain = next((each.recall.bits for each in choices if each.recall), None)
    groups: dict[tuple[Any, ...], list[int]] = {(plain, None, None, None): []}
    for index, choice in enumerate(choices):
        method, recall = choice.method, choice.recall
        key: tuple[Any, ...] = (plain, None, None, None)
        if recall is not None:
            alone = None if method.prefilling.exact else choice.read
            key = (recall.bits, method.prefilling.reconstruction, method.needs.outlook, alone)
        groups.setdefault(key, []).append(index)
    return [group for group in groups.values() if group]


def read_turns(
    model: LoadedModel,
    turns: Sequence[Sequence[int]],
    choices: Sequence[Choice],
    *,
    reserve: int,
) -> list[Branch]:
    """Read tokens turn by turn, none of which is answered before the last.

    Args:
        choices: a party.
        reserve: tokens that will be generated.

    Returns:
        A branch for each choice, with the cache that a conversation would have.
    """
    first, *later = turns
    seen = sum(map(len, turns))
    own = [_in_effect(choice, seen, reserve) for choice in choices]
    recalling = [each for each in own if each.recall]
    store = None
    if recalling:
        (bits,) = {each.recall.bits for each in recalling if each.recall}
        store = HostKVStore.empty(model.shape, model.dtype, bits)
    branches = read_once(model, first, own, reserve=0 if later else reserve, store=store)
    before = [*first]
    for at, turn in enumerate(later):
        room = reserve if at == len(later) - 1 else 0
        recalled = iter(
            read_once(model, turn, recalling, reserve=room, store=store, before=before)
            if recalling
            else []
        )
        for index, branch in enumerate(branches):
            if branch.choice.recall:
                branches[index] = next(recalled)
            else:
                _read_on(model, branch, before, turn, room)
        before += turn
    return [
        replace(branch, choice=choice) for branch, choice in zip(branches, choices, strict=True)
    ]


def _in_effect(choice: Choice, seen: int, reserve: int) -> Choice:
    """A choice that drops nothing has nothing to recall, as in a conversation."""
    lost = loses(choice.method, choice.budget, seen, reserve, choice.bits)
    return choice if lost else replace(choice, recall=None)


def _read_on(
    model: LoadedModel, branch: Branch, before: Sequence[int], turn: Sequence[int], reserve: int
) -> None:
    """A later turn, without a host store."""
    choice, cache, new = branch.choice, branch.cache, len(turn)
    branch.policies = layer_policies(
        choice.method,
        model.shape,
        choice.budget,
        cache.seen + new,
        cache.layers,
        new,
        choice.bits,
    )
    branch.logits = prefill(
        model,
        cache,
        torch.tensor([turn], device=model.device),
        branch.policies,
        context=torch.tensor([before], device=model.device),
        reserve=reserve,
    )[0]
