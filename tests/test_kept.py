"""What the cache holds, and what came back: beside loops over lists, for every kind of layer."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlite.cache import KVCache, LayerCache
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.errors import SnapshotError
from kvlite_app.engine.kept import KeptMap, Look, kept_map, look
from tests.conftest import make_tiny
from tests.oracles import kept as oracle


def sets(cache: KVCache) -> list[list[set[int]]]:
    """For each layer, what each KV head holds; nothing for one that another stands in for."""
    layers = []
    for layer in cache.layers:
        heads = {head: set[int]() for head in layer.head_alias}
        for head_group in layer.head_groups:
            for row, head in enumerate(head_group.heads):
                heads[head] = set(head_group.positions[0, row, : head_group.used].tolist())
        layers.append([heads[head] for head in sorted(heads)])
    return layers


def require_as_oracle(
    cache: KVCache,
    windows: Sequence[int | None],
    then: list[list[set[int]]] | None,
    read: int,
    before: Look | None,
    bins: int,
) -> KeptMap:
    now, seen = sets(cache), cache.seen
    after = look(cache, windows)
    back = [[set[int]() for _ in heads] for heads in now]
    if then is not None:
        back = [oracle.came_back(*pair, read) for pair in zip(then, now, strict=True)]
    made = kept_map(before, after, bins)
    assert (made.seen, made.read, made.bins) == (seen, read, min(bins, seen))
    for layer, held, again, window in zip(made.layers, now, back, windows, strict=True):
        assert layer.window == window
        assert list(layer.held) == oracle.binned(held, len(held), seen, made.bins)
        assert list(layer.back) == oracle.binned(again, len(held), seen, made.bins)
        assert layer.all_held == oracle.per_cent(sum(map(len, held)), len(held) * seen)
        assert layer.all_back == oracle.per_cent(sum(map(len, again)), len(held) * seen)
    return made


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"method": "full"}),
    ("llama", {"method": "kvx", "recall": "ram", "recall_entries": 12}),
    ("llama", {"method": "snapkv:window=4,layers=global", "recall": "ram", "recall_entries": 9}),
    ("llama", {"method": "simlayerkv+kvx", "recall": "off"}),
    ("llama", {"method": "pyramidkv", "recall": "off"}),
    ("llama", {"method": "kvx", "kv_bits": "4", "recall": "ram", "recall_entries": 12}),
    ("llama", {"method": "minicache", "recall": "off"}),
    ("llama-mha", {"method": "uncomp:window=4,delete=1", "recall": "off"}),
    ("llama-mha", {"method": "uncomp:window=4", "kv_bits": "8", "recall": "off"}),
    ("qwen2-sliding", {"method": "kvx", "recall": "ram", "recall_entries": 12}),
    ("mistral-sliding", {"method": "kvx"}),
]


@pytest.mark.cases(3, 12)
@pytest.mark.parametrize("budget", ["30", "41"])
@pytest.mark.parametrize(("model", "chosen"), KINDS, ids=lambda each: str(each))
def test_what_a_conversation_holds_equals_loops_over_lists(
    model: str, chosen: dict[str, Any], budget: str
) -> None:
    tiny = make_tiny(model)
    windows = tiny.model.shape.window_sizes
    talk = Conversation(tiny.model, Settings(budget=budget, max_new_tokens=9).replace(chosen))
    torch.manual_seed(3)
    came = 0
    for count in (120, 17):
        ids = torch.randint(3, 199, (count,)).tolist()
        before, then, read = None, [], 0
        for _ in talk.stream_tokens(ids, ignore_eos=True):
            if before is None:
                before, then, read = look(talk.cache, windows), sets(talk.cache), talk.cache.seen
        assert read < talk.cache.seen == len(talk.token_ids)
        made = require_as_oracle(talk.cache, windows, then, read, before, 16)
        came += sum(layer.all_back for layer in made.layers)
        require_as_oracle(talk.cache, windows, None, talk.cache.seen, None, 1000)
    assert (came > 0) == (chosen.get("recall") == "ram")


class Lines:
    """A cache made of sets of positions, in head groups of heads that hold equally many."""

    def __init__(self, seen: int, layers: list[list[list[int]]], used: int) -> None:
        made = []
        for heads in layers:
            lengths = sorted({len(each) for each in heads})
            alike = [
                tuple(number for number, each in enumerate(heads) if len(each) == length)
                for length in lengths
            ]
            sizes = [(each, n + used) for each, n in zip(alike, lengths, strict=True)]
            kind = {"batch": 2, "dim": 2, "dtype": torch.float32, "device": torch.device("cpu")}
            layer = LayerCache(sizes, **kind)  # type: ignore[arg-type]
            layer.positions.fill_(0)  # what free slots have says nothing
            for head_group, length in zip(layer.head_groups, lengths, strict=True):
                for row, head in enumerate(head_group.heads):
                    head_group.residual_positions[0, row, :length] = torch.tensor(heads[head])
                    head_group.residual_positions[1, row, :length] = -1  # another sequence's
                head_group.used = length
            made.append(layer)
        self.cache = KVCache(made, seen)


@st.composite
def held_lines(draw: st.DrawFn) -> tuple[int, int, list[list[list[int]]], list[list[list[int]]]]:
    seen = draw(st.integers(1, 70))
    read = draw(st.integers(0, seen))
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))

    def lines(most: int) -> list[list[list[int]]]:
        each = st.lists(st.integers(0, most - 1), unique=True) if most else st.just([])
        return [[draw(each) for _ in range(heads)] for _ in range(layers)]

    return seen, read, lines(read), lines(seen)


@given(held_lines(), st.integers(1, 30), st.integers(0, 3), st.data())
@settings(deadline=None, max_examples=60)
def test_bins_of_any_lines_equal_loops_over_lists(
    lines: tuple[int, int, list[list[list[int]]], list[list[list[int]]]],
    bins: int,
    free: int,
    data: st.DataObject,
) -> None:
    seen, read, then, now = lines
    windows = data.draw(st.lists(st.sampled_from([None, 5]), min_size=len(now), max_size=len(now)))
    first, last = Lines(read, then, free).cache, Lines(seen, now, free).cache
    made = require_as_oracle(last, windows, sets(first), read, look(first, windows), bins)
    edges = made.edges
    assert (edges[0], edges[-1], len(edges)) == (0, seen, min(bins, seen) + 1)
    sizes = {end - begin for begin, end in pairwise(edges)}
    assert max(sizes) - min(sizes) <= 1
    assert KeptMap.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_something_is_not_nothing_and_not_all_is_not_all() -> None:
    everything = list(range(1000))
    cache = Lines(1000, [[[7]], [everything[1:]], [everything], [[]]], 0).cache
    made = kept_map(None, look(cache, [None] * 4), bins=1)
    assert [layer.held for layer in made.layers] == [(1,), (99,), (100,), (0,)]
    assert [layer.all_held for layer in made.layers] == [1, 99, 100, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"layers": [[None, 5, 0, [1, 101], 0]]},
        {"layers": [[None, 5, 0, [1, 2, 3], 0]]},
        {"layers": [[None, 5, 0, [1], [0, 0]]]},
        {"layers": [[None, 5, 0, 1]]},
        {"layers": [[0, 5, 0, 1, 0]]},
        {"layers": 3},
        {"read": 9},
        {"bins": "2"},
        {"bins": 9, "layers": [[None, 5, 0, 1, 0]]},
    ],
)
def test_what_is_no_map_is_refused(change: dict[str, Any]) -> None:
    plain = {"seen": 8, "read": 8, "bins": 2, "layers": [[None, 5, 0, [1, 9], 0]]}
    assert KeptMap.from_json(plain).layers[0].held == (1, 9)
    with pytest.raises(SnapshotError, match="not a map"):
        KeptMap.from_json(plain | change)
