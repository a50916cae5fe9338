"""The branches of a conversation as JSON values, and back.

Checkpoints are saved if the cache or the host store gives them back. Copied ones are not; their
tokens are read again. The names in the file are those of version 0.1.0.
"""

from typing import Any

from kvlite.cache.layer import Mark
from kvlite.conversation.branch import Branch, Node
from kvlite.conversation.checkpoint import Checkpoint, LayerState
from kvlite.offload import HostKVStore
from kvlite.offload.kv.checkpoint import HostKVCheckpoint

Plain = dict[str, Any]


def plain_history(branches: list[Branch], current: int, store: HostKVStore | None) -> Plain:
    """Branches as JSON values; `store` is that of the current one."""
    starts = dict[int, Checkpoint]()
    for branch in branches:
        for start in (*(node.start for node in branch.nodes), branch.prefill_start):
            for each in () if start is None else (start, start.prefill_start):
                if each is not None:
                    starts[id(each)] = each
    number = {key: index for index, key in enumerate(starts)}  # None has none
    return {
        "at": current,
        "said": [
            {
                "checkpoint": _checkpoint(start, store),
                "messages": 2 * start.number,
                "ahead": start.prefilled_ids,
                "before": number.get(id(start.prefill_start)),
            }
            for start in starts.values()
        ],
        "paths": [_branch(branch, number, store) for branch in branches],
        "before": number.get(id(branches[current].prefill_start)),
    }


def history_from(plain: Plain, store: HostKVStore | None, layers: int) -> tuple[list[Branch], int]:
    """The saved branches, and the index of the current one, which has the `store`. Raises
    ValueError, LookupError or TypeError if the values are damaged."""
    starts = _starts_from(plain["said"], store, layers)
    branches = [_branch_from(each, starts) for each in plain["paths"]]
    current = _whole(plain["at"])
    branches[current].prefill_start = _one(starts, plain["before"])
    return branches, current


def plain_moment(made: Checkpoint) -> Plain:
    """A checkpoint without what it holds."""
    return {
        "seen": made.seen,
        "pending": made.pending_ids,
        "noted": list(made.notes),
        "rehearsed": made.reconstructed,
    }


def moment_from(plain: Plain) -> Checkpoint:
    """A checkpoint that holds nothing yet; errors are those of `history_from`."""
    pending, notes = _ids(plain["pending"]), tuple(map(str, plain["noted"]))
    return Checkpoint(_whole(plain["seen"]), pending, notes, _whole(plain["rehearsed"]))


def _checkpoint(made: Checkpoint, store: HostKVStore | None) -> Plain:
    states, mark = made.layers, made.store
    cut = [each.copy is None and each.mark and each.mark.rows is None for each in states]
    whole = not made.states and bool(cut) and all(cut)
    read = mark is not None and mark.plain and mark.fits(store)
    kind = "cache" if whole else "tier" if read else ""
    return {
        **plain_moment(made),
        "kind": kind,
        "read": 0 if mark is None else mark.seen,
    }


def _branch(branch: Branch, number: dict[int, int], store: HostKVStore | None) -> Plain:
    nodes = branch.nodes
    return {
        "messages": branch.messages,
        "said": [number[id(node.start)] for node in nodes],
        "read": [node.prompt_end for node in nodes],
        "sealed": branch.frozen_upto,
        "token_ids": branch.token_ids,
        "end": None if branch.end is None else _checkpoint(branch.end, store) | {"kind": ""},
        "ahead": branch.prefilled_ids,
        "before": number.get(id(branch.prefill_start)),
        "parts": branch.boundaries,
        "compacted": branch.compacted,
    }


def _starts_from(plain: list[Plain], store: HostKVStore | None, layers: int) -> list[Checkpoint]:
    # A `prefill_start` has none itself.
    starts = [_checkpoint_from(each["checkpoint"], store, layers) for each in plain]
    for start, each in zip(starts, plain, strict=True):
        start.number, odd = divmod(_whole(each["messages"]), 2)
        start.prefilled_ids, before = _ids(each["ahead"]), each["before"]
        if odd or (before is not None and plain[_whole(before)]["before"] is not None):
            raise ValueError(each)
        start.prefill_start = _one(starts, before)
    return starts


def _checkpoint_from(plain: Plain, store: HostKVStore | None, layers: int) -> Checkpoint:
    made, kind, read = moment_from(plain), plain["kind"], _whole(plain["read"])
    if kind == "cache":
        made.layers = [LayerState(Mark(made.seen, None, -1)) for _ in range(layers)]
    elif kind == "tier" and store is not None and read <= store.seen:
        made.store = HostKVCheckpoint(store, read)
    else:
        made.lost = True
    return made


def _branch_from(plain: Plain, starts: list[Checkpoint]) -> Branch:
    said = [(str(each["role"]), str(each["content"])) for each in plain["messages"]]
    if [role for role, _ in said] != ["user", "assistant"] * len(plain["said"]):
        raise ValueError("messages come in pairs")
    texts, tip = [text for _, text in said], None
    thoughts = [
        (str(each.get("reasoning_content", "")), _whole(each.get("reasoning_tokens", 0)))
        for each in plain["messages"][1::2]
    ]
    ends = zip(plain["said"], _ids(plain["read"]), texts[::2], texts[1::2], thoughts, strict=True)
    for number, (index, end, text, answer, thought) in enumerate(ends):
        start = starts[_whole(index)]
        if start.number != number:
            raise ValueError(index)
        tip = Node(tip, start, text, end, answer, *thought)
    return Branch(
        tip,
        _whole(plain["sealed"]),
        bool(plain.get("compacted", plain["sealed"])),
        _ids(plain["ahead"]),
        _one(starts, plain["before"]),
        _ids(plain.get("parts", [])),
        _ids(plain["token_ids"]),
        None if plain["end"] is None else _checkpoint_from(plain["end"], None, 0),
    )


def _one(starts: list[Checkpoint], index: Any) -> Checkpoint | None:
    return None if index is None else starts[_whole(index)]


def _whole(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(number)
    return number


def _ids(plain: Any) -> list[int]:
    return [_whole(each) for each in plain]
