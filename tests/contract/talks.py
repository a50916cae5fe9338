"""Conversations that are compared: what they say, what they hold, and how they go on."""

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvlite
from kvlite import Callbacks, Conversation
from kvlite.config.settings import Settings
from kvlite.methods import METHODS
from tests.conftest import Tiny, make_tiny

LONG = " ".join(str(3 + 7 * i % 190) for i in range(90))
FIRST, SECOND, THIRD = f"{LONG} 11 12 13", "21 22 23 24", "31 32 33"
OTHER = "41 42 43 44 45 46"
WORDS = [f"{20 + word} {50 + word} {80 + 3 * word}" for word in range(6)]

# Ways to hold a conversation. A late one drops for the first time after some messages.
GIVEN: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "recall": {"budget": "40"},
    "recall-8": {"budget": "40", "recall_bits": "8"},
    "recall-4": {"budget": "40", "recall_bits": "4"},
    "recall-disk": {"budget": "40", "recall": "disk"},
    "forget": {"budget": "40", "recall": "off"},
    "four bits": {"kv_bits": "4g32", "recall": "off"},
    "four bits recalled": {"kv_bits": "4g32", "budget": "50"},
    "late": {"budget": "106"},
    "late, forgotten": {"budget": "106", "recall": "off"},
    "late, by attention": {"method": "h2o", "budget": "106", "recall": "off"},
    "late, by attention, recalled": {"method": "h2o", "budget": "106"},
    "settled by a step": {
        "method": "simlayerkv:threshold=0.3,recent=20,detect=decode",
        "budget": "500",
        "recall": "off",
    },
    "late, rounded": {"budget": "106", "recall_bits": "4"},
}
GIVEN |= {
    f"{name}, forgotten": {"method": name, "budget": "60", "recall": "off"} for name in METHODS
}
GIVEN |= {
    name: {"method": name, "budget": "60"}
    for name in METHODS
    if METHODS[name]().prefilling.mask is None and METHODS[name]().compresses
}
# A cache whose answers come from reading as they came from drawing, and those that read again what
# they need.
ALIKE = ["full", "late", "late, rounded", "full, forgotten", "minference, forgotten"]
RECALLED = [
    *("recall", "recall-4", "recall-8", "recall-disk", "four bits recalled"),
    *(name for name in GIVEN if name in METHODS and name != "full"),
]
# Of those, one of each kind.
KINDS_OF_HOLDING = [
    *list(GIVEN)[:14],
    *("kvzip", "minicache, forgotten", "chai", "pyramidinfer", "uncomp, forgotten"),
    *("streaming, forgotten", "lminfinite, forgotten", "h2o", "simlayerkv"),
]
SMALL = {"max_position_embeddings": 256}


def opened(tiny: Tiny, **given: Any) -> Conversation:
    base = {"max_new_tokens": 5, "stop": ("no such text",)}
    return kvlite.Runner(tiny.model, Settings().replace(base | given)).conversation()


def said(talk: Conversation, *texts: str) -> list[list[int]]:
    return [heard(talk.stream(text)) for text in texts]


def heard(pieces: Iterator[Any]) -> list[int]:
    return [piece.token_id for piece in pieces]


def entries(talk: Conversation) -> list[list[tuple[Tensor, ...]]]:
    """What every head of every layer holds, in order of positions."""
    found = []
    for layer in talk.cache.layers:
        heads: dict[int, tuple[Tensor, ...]] = {}
        for head_group in layer.head_groups:
            order = head_group.positions[0, :, : head_group.used].argsort(-1)
            for row, head in enumerate(head_group.heads):
                picked = order[row]
                held = [
                    each[0, row, picked]
                    for each in (head_group.positions, head_group.keys, head_group.values)
                ]
                if head_group.rows is not None:
                    held.append(head_group.rows[0, row][:, picked])
                heads[head] = tuple(held)
        found.append([heads[head] for head in sorted(heads)])
    return found


def refused(*_: Any) -> None:
    raise AssertionError("something is read again")


def same(one: Conversation, two: Conversation) -> None:
    """Both stand alike, bit by bit, and go on alike."""
    assert one.messages == two.messages
    assert [*one.token_ids, *one.context.pending_ids] == [*two.token_ids, *two.context.pending_ids]
    for mine, theirs in zip(entries(one), entries(two), strict=True):
        for held, expected in zip(mine, theirs, strict=True):
            assert all(a.equal(b) for a, b in zip(held, expected, strict=True))
    assert said(one, THIRD) == said(two, THIRD)
    assert one.messages == two.messages


def again(tiny: Tiny, path: Path, reading: Callbacks | None = None, **given: Any) -> Conversation:
    runner = kvlite.Runner(tiny.model, Settings())
    return runner.open(path, reading=reading or Callbacks(), **given)


def whole(tiny: Tiny, talk: Conversation) -> list[int]:
    """What the model answers to these very tokens when it reads them anew and keeps all."""
    ids = talk.token_ids[: talk.history.branch.tip.prompt_end]
    fresh = opened(tiny, method="full")
    return fresh.generate(ids).token_ids


def state(talk: Conversation) -> list[Any]:
    """All that there is to see of a conversation, copied."""
    found: list[Any] = [talk.branches, [*talk.token_ids], [*talk.context.pending_ids]]
    store = talk.store
    tensors = [
        *talk.cache.tensors,
        *([] if store is None else [*store.tensors, *store.index_tensors]),
    ]
    # As bytes: what is not filled yet may be no number, and equal to nothing.
    held = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    found += [[tensor.clone() for tensor in held], talk.context.checkpoint_bytes]
    found += [len(talk.context.checkpoints), [*talk.context.oom_policy.taken], talk.context.notes]
    return copy.deepcopy(found)


def untouched(before: list[Any], after: list[Any]) -> None:
    assert len(before[3]) == len(after[3])
    assert all(one.equal(other) for one, other in zip(before[3], after[3], strict=True))
    assert before[:3] + before[4:] == after[:3] + after[4:]


@cache
def llama_once() -> Tiny:
    return make_tiny("llama")


def gone_ways(tiny: Tiny, **given: Any) -> Conversation:
    """A conversation of three messages, the last of which was edited."""
    talk = opened(tiny, **given)
    said(talk, FIRST, SECOND, THIRD)
    list(talk.edit(3, WORDS[2]))
    return talk
