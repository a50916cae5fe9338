"""Decode for several branches of one prompt, as one batch.

Branches that recall while answering take turns: they share the host store, which takes an answer's
tokens too.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from statistics import fmean

import torch
from torch import Tensor

from kvlite.bench.fork import Branch
from kvlite.cache import KVCache
from kvlite.engine.prefill import Prefill
from kvlite.engine.slices import in_one_go
from kvlite.engine.step import StepRows, step
from kvlite.methods.full import Full
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.model.load import LoadedModel

_FULL = Full()


def step_together(model: LoadedModel, branches: Sequence[Branch], tokens: Sequence[int]) -> None:
    """One decode step for each branch, which gets its next logits; if one recalls while answering,
    it alone."""
    rows = [
        StepRows(model, branch.cache, torch.tensor([[token]]), branch.policies, branch.recall)
        for branch, token in zip(branches, tokens, strict=True)
    ]
    for branch, logits in zip(branches, step(model, rows), strict=True):
        assert not isinstance(logits, Exception), "without an OOM policy it is raised"
        branch.logits = logits[0]


def answers(model: LoadedModel, branches: Sequence[Branch], longest: int) -> list[list[int]]:
    """Each branch's greedy answer, the ending token left out; the branches go on with it."""
    said: list[list[int]] = [[] for _ in branches]
    for going in _batches(branches, range(len(branches))):
        while True:
            drawn = {i: int(branches[i].logits.argmax()) for i in going}
            going = [i for i in going if drawn[i] not in model.stop_ids and len(said[i]) < longest]
            for i in going:
                said[i].append(drawn[i])
            # What follows an answer's last token is not asked for.
            going = [i for i in going if len(said[i]) < longest]
            if not going:
                break
            step_together(model, [branches[i] for i in going], [drawn[i] for i in going])
    return said


def _batches(branches: Sequence[Branch], indices: Iterable[int]) -> Iterator[list[int]]:
    """Which of some branches, by index, can take steps together. Before one that recalls, its host
    store forgets the answer of the one before."""
    own = {index: branches[index].recall for index in indices}
    if together := [index for index, recall in own.items() if recall is None]:
        yield together
    for index, recall in own.items():
        if recall is not None:
            recall.store.forget_answer()
            yield [index]


Judge = Callable[[int, int, Tensor], None]


def teacher_force(
    model: LoadedModel, branches: Sequence[Branch], ids: Sequence[int], judge: Judge
) -> None:
    """Make every branch say the same tokens. Branches stay as they are.

    Append-only caches take all tokens in one pass, which comes to the same; others step by step,
    as they evict, quantize or recall.

    Args:
        judge: given the branch's index, an index into `ids` and the logits `(n, vocab)` from which
            that token and the n - 1 after it would have been drawn; in order for each branch.
    """
    stepping = []
    for index, branch in enumerate(branches):
        judge(index, 0, branch.logits[None])
        if branch.recall is not None or not all(map(_only_grows, branch.policies)):
            stepping.append(index)
        elif len(ids) > 1:
            judge(index, 1, _one_pass(model, branch, ids[:-1]))
    for batch in _batches(branches, stepping):
        apart = [branches[index].copy() for index in batch]
        for at, token in enumerate(ids[:-1]):
            step_together(model, apart, [token] * len(apart))
            for index, branch in zip(batch, apart, strict=True):
                judge(index, at + 1, branch.logits[None])


@torch.inference_mode()
def _one_pass(model: LoadedModel, branch: Branch, ids: Sequence[int]) -> Tensor:
    """Logits `(n, vocab)` after each of n tokens; the branch stays as it is."""
    policies = [
        policy if policy.window is not None else LayerPolicy(_FULL, policy.budget)
        for policy in branch.policies
    ]
    cache = KVCache(list(branch.cache.layers), branch.cache.seen, states=branch.cache.states)
    reading = Prefill(model, cache, torch.tensor([ids], device=model.device), policies, whole=True)
    for index in range(len(policies)):
        in_one_go(reading.read_layer(index))
    return model.logits(reading.hidden[0])


def _only_grows(policy: LayerPolicy) -> bool:
    method = policy.method
    only_appends = method.decoding.append_only and method.across.resolving is None
    return policy.bits is None and (policy.window is not None or only_appends)


def surprise(
    model: LoadedModel, branches: Sequence[Branch], ids: Sequence[int], at: Collection[int]
) -> list[float]:
    """Mean negative log-likelihood in nats, of the tokens at some indices of `ids`, for each
    branch that is made to say all of them."""
    nats: list[list[float]] = [[] for _ in branches]

    def compare_logits(index: int, begin: int, logits: Tensor) -> None:
        for place, row in enumerate(logits, begin):
            if place in at:
                nats[index].append(-float(row.log_softmax(-1)[ids[place]]))

    teacher_force(model, branches, ids, compare_logits)
    return [fmean(each) for each in nats]
