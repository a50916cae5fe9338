"""Spans, the default: KV-X set so that spans of text stay, found by a few of the last queries."""

from dataclasses import dataclass
from typing import Literal

from kvlite.methods.allocation import LayerLine
from kvlite.methods.kvx import KVX
from kvlite.methods.scores import Reduce


@dataclass(frozen=True)
class Spans(KVX):
    """The default: KV-X with few scoring queries, scores pooled over spans of 31 tokens, the same
    budget for every layer, few sinks, and no eviction while answering.

    The same as `kvx:pool=31,layers=uniform,queries=max,heads=max,omega=16,alpha=32,decode=grow`,
    as versions up to 0.1.0 wrote it.
    """

    name = "spans"
    summary = "the default: keeps spans of text by the attention they get"
    paper = KVX.paper

    pool: int = 31
    layers: LayerLine = "uniform"
    queries: Reduce = "max"
    heads: Reduce = "max"
    omega: int = 16
    alpha: int = 32
    decode: Literal["evict", "grow"] = "grow"
