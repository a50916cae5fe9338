"""The ways a conversation went, as plain values for a file and back.

Of a checkpoint a file has what little it takes where the cache or the host store gives it back;
what was copied is not saved, and is read again if it is gone back to."""

from typing import Any

from kvlite.cache.layer import Mark
from kvlite.conversation.checkpoint import Checkpoint, LayerState
from kvlite.conversation.history import Node, Path
from kvlite.offload import HostKVStore
from kvlite.offload.kv.checkpoint import HostKVCheckpoint

Plain = dict[str, Any]


def recorded(paths: list[Path], at: int, store: HostKVStore | None) -> Plain:
    """All that there is to say of them.

    Args:
        at: the current one's index.
        store: of the current one.
    """
    said: dict[int, Node] = {}
    for path in paths:
        for each in (*path.said, path.before):
            if each is not None:
                said |= {id(own): own for own in (each, each.before) if own is not None}
    number = {key: index for index, key in enumerate(said)}
    return {
        "at": at,
        "said": [_said(each, number, store) for each in said.values()],
        "paths": [_path(path, number, store) for path in paths],
        "before": _number(paths[at].before, number),
    }


def walked(plain: Plain, store: HostKVStore | None, layers: int) -> tuple[list[Path], int]:
    """The ways that were recorded, and the index of the current one.

    Args:
        store: of the current one.
        layers: of the model.

    Raises:
        ValueError, LookupError, TypeError: these are none.
    """
    said = [_said_again(each, store, layers) for each in plain["said"]]
    for made, each in zip(said, plain["said"], strict=True):
        made.before = _one(said, each["before"])
    paths = [_path_again(each, said) for each in plain["paths"]]
    at = _whole(plain["at"])
    paths[at].before = _one(said, plain["before"])
    return paths, at


def _said(said: Node, number: dict[int, int], store: HostKVStore | None) -> Plain:
    return {
        "checkpoint": _checkpoint(said.checkpoint, store),
        "messages": said.messages,
        "ahead": said.ahead,
        "before": _number(said.before, number),
    }


def _number(said: Node | None, number: dict[int, int]) -> int | None:
    return None if said is None else number[id(said)]


def _checkpoint(made: Checkpoint, store: HostKVStore | None) -> Plain:
    states, mark = made.layers, made.store
    whole = bool(states) and all(
        each.copy is None and each.mark is not None and each.mark.rows is None for each in states
    )
    read = mark is not None and mark.plain and mark.fits(store)
    kind = "cache" if whole else "tier" if read else ""
    return {
        "seen": made.seen,
        "pending": made.pending,
        "noted": list(made.noted),
        "rehearsed": made.reconstructed,
        "kind": kind,
        "read": 0 if mark is None else mark.seen,
    }


def _path(path: Path, number: dict[int, int], store: HostKVStore | None) -> Plain:
    return {
        "messages": path.messages,
        "said": [number[id(each)] for each in path.said],
        "read": path.read,
        "sealed": path.frozen_upto,
        "token_ids": path.token_ids,
        "end": None if path.end is None else _checkpoint(path.end, store) | {"kind": ""},
        "ahead": path.ahead,
        "before": _number(path.before, number),
        "parts": path.parts,
        "compacted": path.compacted,
    }


def _said_again(plain: Plain, store: HostKVStore | None, layers: int) -> Node:
    made = _checkpoint_again(plain["checkpoint"], store, layers)
    return Node(made, _whole(plain["messages"]), _ids(plain["ahead"]))


def _checkpoint_again(plain: Plain, store: HostKVStore | None, layers: int) -> Checkpoint:
    seen, kind, read = _whole(plain["seen"]), plain["kind"], _whole(plain["read"])
    noted = tuple(map(str, plain["noted"]))
    made = Checkpoint(seen, _ids(plain["pending"]), noted, _whole(plain["rehearsed"]))
    if kind == "cache":
        made.layers = [LayerState(Mark(seen, None, -1)) for _ in range(layers)]
    elif kind == "tier" and store is not None and read <= store.seen:
        made.store = HostKVCheckpoint.at(store, read)
    else:
        made.lost = True
    return made


def _path_again(plain: Plain, said: list[Node]) -> Path:
    every = [said[_whole(index)] for index in plain["said"]]
    path = Path(
        messages=[
            {"role": str(each["role"]), "content": str(each["content"])}
            for each in plain["messages"]
        ],
        said=every,
        read=_ids(plain["read"]),
        frozen_upto=_whole(plain["sealed"]),
        token_ids=_ids(plain["token_ids"]),
        end=None if plain["end"] is None else _checkpoint_again(plain["end"], None, 0),
        ahead=_ids(plain["ahead"]),
        before=_one(said, plain["before"]),
        parts=_ids(plain.get("parts", [])),
        compacted=bool(plain.get("compacted", plain["sealed"])),
    )
    if len(path.read) != len(every) or any(s.messages >= len(path.messages) for s in every):
        raise ValueError
    return path


def _one(said: list[Node], index: Any) -> Node | None:
    return None if index is None else said[_whole(index)]


def _whole(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError
    return number


def _ids(plain: Any) -> list[int]:
    return [_whole(each) for each in plain]
