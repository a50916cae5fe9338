"""Where a model's attention falls in each layer, beside the lines that methods cut layers to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import fmean
from typing import Any, ClassVar

import torch

from kvlite.bench.fidelity import parts
from kvlite.bench.options import AttentionOptions
from kvlite.bench.prose import bundled_prose, digest
from kvlite.bench.rows import Cells, Row
from kvlite.bench.task import Task, Work
from kvlite.conversation.runner import Runner
from kvlite.documents import read_document
from kvlite.engine.prefill import Prefill
from kvlite.engine.probe import Probe, probing
from kvlite.engine.slices import in_one_go
from kvlite.methods import parse_method
from kvlite.methods.base import LayerView
from kvlite.model.load import LoadedModel

# The last tokens, whose attention is looked at, and the share of it that entries are counted for.
QUERIES, MOST = 32, 0.9
BINS = 60
# Methods that give lower layers more, by a line that the paper draws.
LINES = ("pyramidkv", "kvx")


@dataclass(frozen=True, kw_only=True)
class AttentionRow(Row):
    """A layer that has read one part of a text.

    Attributes:
        needed: entries that take `MOST` of the attention of the last tokens; mean over heads.
        shares: of that attention, on each of `BINS` parts of equal length, from the beginning.
    """

    KEY: ClassVar = ("part", "layer")

    part: int
    layer: int
    length: int
    needed: float
    shares: Sequence[float]


@dataclass(kw_only=True)
class Attention(AttentionOptions, Task[AttentionRow]):
    """Attention by layer."""

    title: ClassVar = "Attention by layer"
    row: ClassVar = AttentionRow

    def __post_init__(self) -> None:
        self.text = read_document(self.file).text if self.file else bundled_prose()

    def options(self) -> dict[str, Any]:
        text = {"file": self.file or "bundled prose", "text": digest(self.text)}
        return {**super().options(), **text}

    def work(self, runner: Runner) -> list[Work[AttentionRow]]:
        # Of models with sliding windows, the layers without.
        model = runner.model
        ids: list[int] = runner.tokenizer.encode(self.text)
        length = self.tokens
        starts = parts(len(ids), [length], 0, self.repeats, model.shape.max_context)[length]
        layers = model.shape.full_layers
        return [
            (
                [AttentionRow.key({"part": part, "layer": layer}) for layer in layers],
                partial(_rows, model, ids[start : start + length], part),
            )
            for part, start in enumerate(starts)
        ]

    def table(self, rows: Sequence[AttentionRow]) -> list[Cells]:
        found = _by_layer(rows)
        lines = lines_of([each.needed for each in found], self.tokens)
        return [
            {
                "layer": str(each.layer),
                f"entries for {MOST:.0%} of the attention": f"{each.needed:,.0f}",
                **{f"line of {name}": f"{line[at]:,}" for name, line in lines.items()},
                "on the first 1/60": f"{each.shares[0]:.0%}",
                "on the last 1/60": f"{each.shares[-1]:.0%}",
            }
            for at, each in enumerate(found)
        ]


def lines_of(needed: Sequence[float], length: int) -> dict[str, list[int]]:
    """By method, what it would keep of each layer, with as many entries altogether as these."""
    return {
        name: parse_method(name).layer_budgets(len(needed), round(fmean(needed)), length)
        for name in LINES
        if needed and round(fmean(needed)) >= parse_method(name).min_budget
    }


def _by_layer(rows: Sequence[AttentionRow]) -> list[AttentionRow]:
    ordered = sorted(rows, key=lambda row: row.layer)
    return [
        AttentionRow(
            part=0,
            layer=layer,
            length=own[0].length,
            needed=fmean(row.needed for row in own),
            shares=[fmean(each) for each in zip(*(row.shares for row in own), strict=True)],
        )
        for layer, own in ((at, [*found]) for at, found in groupby(ordered, lambda row: row.layer))
    ]


@torch.inference_mode()
def _rows(model: LoadedModel, ids: list[int], part: int) -> Iterator[AttentionRow]:
    tokens, length = torch.tensor([ids], device=model.device), len(ids)
    policies = probing(model.shape, Probe(QUERIES))
    reading = Prefill(model, model.empty_cache(), tokens, policies)
    for index, window in enumerate(model.shape.windows):
        view = in_one_go(reading.read_layer(index)).view(index)
        if window is None:
            needed, shares = attention_of(view)
            yield AttentionRow(part=part, layer=index, length=length, needed=needed, shares=shares)


def attention_of(view: LayerView) -> tuple[float, list[float]]:
    """Of a layer with everything in it: entries that take `MOST` of its window's attention, and
    the shares of `BINS` parts of it; means over query heads."""
    counts, shares = list[float](), []
    for head_group in view.head_groups:
        for row in range(len(head_group.heads)):
            paid = torch.zeros((), dtype=torch.float64, device=view.window.place)
            for _, weights in view.window.blocks(head_group, row):
                each = weights[0].double().sum(1)
                missing = head_group.used - each.shape[-1]
                paid = paid + torch.nn.functional.pad(each, (0, missing))
            paid = paid / paid.sum(-1, keepdim=True)
            rising = paid.sort(-1, descending=True).values.cumsum(-1)
            counts += ((rising < MOST).sum(-1) + 1).tolist()
            bins = torch.arange(paid.shape[-1], device=paid.device) * BINS // paid.shape[-1]
            shares.append(paid.new_zeros(len(paid), BINS).index_add_(1, bins, paid))
    return fmean(counts), torch.cat(shares).mean(0).tolist()
