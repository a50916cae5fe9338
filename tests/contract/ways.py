"""Ways to hold what was read, and ways to take tokens through the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvlite.cache import KVBits, KVCache, parse_kv_bits
from kvlite.engine.cuda_graph import GraphDecoder
from kvlite.engine.prefill import prefill
from kvlite.engine.speculate import room_ahead
from kvlite.engine.step import StepRows, step
from kvlite.methods import parse_method
from kvlite.methods.layer_policy import LayerPolicy, layer_policies
from kvlite.model.load import LoadedModel
from kvlite.offload import HostKVStore, Recall
from tests import graph_double

PROMPT, STEPS = 90, 40


@dataclass(frozen=True)
class Way:
    """How a conversation holds what it read.

    Attributes:
        recall: entries that each token brings back, if any are.
        stored: bits of what is kept for that.
    """

    method: str
    budget: int = 30
    bits: str = "16"
    recall: int | None = None
    stored: str = "16"

    def __str__(self) -> str:
        recalls = "" if self.recall is None else f"-recall {self.recall} of {self.stored}"
        return f"{self.method}-{self.bits}{recalls}"


# Every method whose reading is exact, with each kind of option that changes what a step does.
EVICTING = [
    *("streaming", "kvx", "kvx:recent=4,per_head=true", "h2o", "h2o:norm=mean,per_head=true"),
    *("tova", "tova:per_head=true", "uncomp:window=8", "kvx:middle=example,omega=8"),
    *("kvx:per_layer=true", "simlayerkv:threshold=0.6,recent=20,bound_decode=true+kvx"),
]
APPENDING = [
    *("full", "spans", "random:window=8", "streaming:roll=false", "snapkv:window=8"),
    *("snapkv:window=8,per_head=true", "snapkv:window=8,layers=global", "pyramidkv:window=8"),
    *("keydiff", "kvzip:window=4", "kvx:decode=grow", "uncomp:window=8,delete=1"),
    *("minicache:start=0", "chai:start=0", "minference", "simlayerkv:threshold=0.5,recent=20"),
    "simlayerkv:threshold=0.3,recent=20,detect=decode",
]
WAYS = [
    *(Way(method) for method in (*APPENDING, *EVICTING)),
    *(Way("full", bits=bits) for bits in ("8", "4", "2", "k8v4", "kivi4")),
    *(Way(method, 60, bits) for method in ("spans", "h2o") for bits in ("8", "4")),
    *(Way("snapkv:window=8,per_head=true", 60, "k8v4"), Way("snapkv:window=8", 60, "kivi2")),
    *(Way("streaming", 60, "4"), Way("minicache", 60, "4"), Way("keydiff", 60, "8")),
    *(
        Way(method, 40, recall=8)
        for method in ("spans", "snapkv:window=8,per_head=true", "h2o", "tova", "kvzip:window=4")
    ),
    *(Way("spans", 40, stored=bits, recall=8) for bits in ("8", "4")),
    *(Way("spans", 60, "4", recall=16), Way("h2o", 60, "8", recall=16, stored="4")),
    Way("snapkv:window=8", 40, recall=0),
]


@dataclass
class Talk:
    """A prompt that was read, and what steps go on from."""

    model: LoadedModel
    cache: KVCache
    policies: list[LayerPolicy]
    logits: Tensor
    store: HostKVStore | None
    entries: int = 0

    @classmethod
    def read(cls, model: LoadedModel, way: Way, ids: list[int], chunk: int = 32) -> "Talk":
        """In chunks."""
        method = parse_method(way.method).fitted(model.shape, model.calibration)
        cache, bits, stored = model.empty_cache(), parse_kv_bits(way.bits), None
        policies = layer_policies(method, model.shape, way.budget, len(ids), bits=bits)
        if way.recall is not None:
            kept = parse_kv_bits(way.stored)
            assert kept is None or isinstance(kept, KVBits)
            stored = HostKVStore.empty(model.shape, model.dtype, kept)
        given = {"store": stored, "reserve": STEPS + 8, "chunk": chunk}
        logits = prefill(model, cache, torch.tensor([ids]), policies, **given)
        return cls(model, cache, policies, logits, stored, way.recall or 0)

    def rows(self, *tokens: int) -> StepRows:
        """Tokens as rows of a step."""
        recall = None if self.store is None else Recall(self.store, self.entries)
        return StepRows(self.model, self.cache, torch.tensor([tokens]), self.policies, recall)


class Steps:
    """A way to take the tokens of an answer through the model."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk

    def take(self, tokens: list[int]) -> list[Tensor]:
        """The logits after each of the next few tokens; how many is up to the way."""
        (logits,) = step(self.talk.model, [self.talk.rows(tokens[0])])
        assert isinstance(logits, Tensor)
        return [logits[0]]


class Together(Steps):
    """Others, which hold what they read otherwise, join, and leave again."""

    def __init__(self, talk: Talk) -> None:
        super().__init__(talk)
        ways = (Way("full"), Way("spans", 48, "4"), Way("h2o"))
        ids = [3 + 5 * at % 170 for at in range(70)]
        self.others = [
            Talk.read(talk.model, way, ids[: 40 + 15 * at]) for at, way in enumerate(ways)
        ]
        self.taken = 0

    def take(self, tokens: list[int]) -> list[Tensor]:
        company = self.others[self.taken // 8 % 3 :]
        self.taken += 1
        rows = [*(each.rows(7) for each in company[1:]), self.talk.rows(tokens[0])]
        rows += [each.rows(9) for each in company[:1]]
        logits = step(self.talk.model, rows)[len(company) - 1]
        assert isinstance(logits, Tensor)
        return [logits[0]]


class Proposed(Steps):
    """Several at once, as far as they find room, of which only the right ones count."""

    def take(self, tokens: list[int]) -> list[Tensor]:
        room = room_ahead(self.talk.cache, self.talk.policies)
        if room < 3:
            return super().take(tokens)
        tokens = tokens[: min(5, room - 1)]
        rows = self.talk.rows(*tokens, 3)
        (logits,) = step(self.talk.model, [rows])
        assert isinstance(logits, Tensor)
        found = [logits, *map(rows.accept, tokens[1:])]
        assert rows.accept(4) is None
        rows.leave()
        return [each[0] for each in found if each is not None]


class Replayed(Steps):
    """As a program that was recorded once."""

    def __init__(self, talk: Talk) -> None:
        super().__init__(talk)
        self.graphs = GraphDecoder(talk.model, None, graph_double.capture)

    def take(self, tokens: list[int]) -> list[Tensor]:
        logits = self.graphs.step([self.talk.rows(tokens[0])])
        return super().take(tokens) if logits is None else [logits[0].clone()]


@contextmanager
def plain_torch() -> Iterator[None]:
    """Without compiled loops, which only a CPU has."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("cache.quantization.hadamard", "engine.implementations"):
            patch.setattr(f"kvlite.{module}.has_compiled", lambda device: False)
        yield
