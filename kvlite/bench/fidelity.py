"""How far next-token distributions move when a cache is cut, on real text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import inf
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvlite.bench.batch_decode import teacher_force
from kvlite.bench.fork import Branch, Choice, parties, read_turns
from kvlite.bench.grid import require_memory
from kvlite.bench.options import FidelityOptions
from kvlite.bench.prose import bundled_prose, digest
from kvlite.bench.rows import Cells, Curve, QualityRow, tallies
from kvlite.bench.task import GridTask, Work
from kvlite.cache import KVCache, KVHeadGroup
from kvlite.conversation.runner import Runner
from kvlite.documents import read_document
from kvlite.engine.prefill import Prefill
from kvlite.engine.probe import Probe
from kvlite.engine.slices import in_one_go
from kvlite.errors import SettingError
from kvlite.methods.base import LayerView
from kvlite.model.load import LoadedModel


@dataclass(frozen=True, kw_only=True)
class FidelityRow(QualityRow):
    """One part of a text, read and cut by one method, and the tokens after it.

    Attributes:
        start: index in the text of its first token.
        scored: distributions compared, each after one more token of the text; the first, right
            after the cut, is left out, since most methods read exactly.
        kl: mean KL divergence in nats of the method's distribution from the full cache's.
        agreement: share of distributions whose likeliest token is the full cache's.
        nll_change: mean rise of the text's own negative log-likelihood, nats a token.
        attention_kept: of the attention that the tokens after the cut pay, in the full cache, to
            those before it, the share that falls on what the cut kept; mean over query heads and
            over the layers that see everything; 1 if there are none.
    """

    KEY: ClassVar = ("length", "start", "method", "budget", "kv_bits", "recall")
    BOUNDS: ClassVar = {"kl": (0, inf), "agreement": (0, 1), "attention_kept": (0, 1)}

    start: int
    scored: int
    kl: float
    agreement: float
    nll_change: float
    attention_kept: float


@dataclass(kw_only=True)
class Fidelity(FidelityOptions, GridTask[FidelityRow]):
    """Predictions after a cut beside the full cache's."""

    title: ClassVar = "Fidelity to the full cache"
    row: ClassVar = FidelityRow
    curves: ClassVar = (
        Curve("kl", "KL from the full cache (nats)", log=True),
        Curve("agreement", "same top token (share)"),
        Curve("attention_kept", "attention kept (share)"),
    )
    records_recall: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.text = read_document(self.file).text if self.file else bundled_prose()

    def options(self) -> dict[str, Any]:
        text = {"file": self.file or "bundled prose", "text": digest(self.text)}
        return {**super().options(), **text}

    def work(self, runner: Runner) -> list[Work[FidelityRow]]:
        model, ids = runner.model, runner.tokenizer.encode(self.text)
        starts = parts(len(ids), self.tokens, self.after, self.repeats, model.shape.max_context)
        require_memory(self.choices, model, max(self.tokens) + self.after)
        return fidelity(model, ids, self.fitted(model), starts=starts, after=self.after)

    def table(self, rows: Sequence[FidelityRow]) -> list[Cells]:
        return [
            {
                **tally.setting(),
                "parts": str(len(tally.rows)),
                "KL, nats": tally.estimate("kl").shown(3),
                "same top token": tally.estimate("agreement").shown(3),
                "change of NLL": tally.estimate("nll_change").shown(3),
                "attention kept": tally.estimate("attention_kept").shown(3),
            }
            for tally in tallies(rows)
        ]


def fidelity(
    model: LoadedModel,
    ids: Sequence[int],
    choices: Sequence[Choice],
    *,
    starts: Mapping[int, Sequence[int]],
    after: int,
) -> list[Work[FidelityRow]]:
    """Every part of a text, read once for all choices that one host store serves.

    Args:
        ids: the text.
        choices: what is compared; `full`, not quantized, is one of them.
        starts: of each length, where parts begin; `length + after` tokens follow each.
    """
    shared = parties(choices)
    work: list[Work[FidelityRow]] = []
    for length, own in starts.items():
        for start in own:
            about = {"length": length, "start": start}
            keys = [FidelityRow.key({**about, **each.columns}) for each in chain(*shared)]
            part = list(ids[start : start + length + after])
            work.append((keys, partial(_rows, model, part, shared, about)))
    return work


def parts(
    text: int, lengths: Sequence[int], after: int, repeats: int, trained: int
) -> dict[int, list[int]]:
    """Where up to `repeats` parts of a text begin, for each length: spread evenly from its
    beginning to its end, overlapping where it is short.

    Args:
        text: tokens of the text.
        after: tokens that follow those read, in each part.
        trained: tokens the model was trained for.

    Raises:
        SettingError: a part is longer than the text or the model.
    """
    limit = min(text, trained)
    if max(lengths) + after > limit:
        given, together = f"--tokens {max(lengths)} is too long", ""
        if after:
            given = f"--tokens {max(lengths)} and --after {after} are too many"
            together = " together"
        raise SettingError(
            f"{given}: give up to {limit:,}{together} (the text has {text:,} tokens, the model was "
            f"trained for {trained:,})"
        )
    starts = {}
    for length in lengths:
        last = text - length - after
        steps = max(1, repeats - 1)
        starts[length] = sorted({index * last // steps for index in range(repeats)})
    return starts


def _rows(
    model: LoadedModel,
    part: list[int],
    shared: list[list[Choice]],
    about: dict[str, Any],
) -> Iterator[FidelityRow]:
    length = about["length"]
    after = part[length:]
    whole: Branch | None = None
    for choices in shared:
        branches = read_turns(model, [part[:length]], choices, reserve=len(after))
        # What the full cache holds needs no recall, so it is in the first party.
        whole = whole or next(each for each in branches if each.choice.is_full)
        yield from _beside(model, whole, branches, after, about)
        del branches  # a host store is freed before the next is filled


def _beside(
    model: LoadedModel,
    whole: Branch,
    branches: Sequence[Branch],
    after: list[int],
    about: dict[str, Any],
) -> list[FidelityRow]:
    truth, kept = _truth(model, whole, branches, after[:-1])
    sums = torch.zeros(len(branches), 3, dtype=torch.float64)

    def compare_logits(index: int, at: int, logits: Tensor) -> None:
        if at:
            wanted = torch.tensor(after[at : at + len(logits)], device=logits.device)
            sums[index] += _distance(truth[at - 1 : at - 1 + len(logits)], logits, wanted).cpu()

    teacher_force(model, branches, after, compare_logits)
    scored = len(after) - 1
    means = (sums / scored).tolist()
    return [
        FidelityRow(
            **about,
            **branch.columns,
            scored=scored,
            kl=kl,
            agreement=agreement,
            nll_change=change,
            attention_kept=share,
        )
        for branch, (kl, agreement, change), share in zip(branches, means, kept, strict=True)
    ]


def _distance(truth: Tensor, logits: Tensor, wanted: Tensor) -> Tensor:
    """Sums over n distributions `(n, vocab)`: KL(truth || other), equal likeliest tokens, and the
    rise of the negative log-likelihood of `wanted`."""
    p, q = truth.log_softmax(-1).double(), logits.log_softmax(-1).double()
    kl = (p.exp() * (p - q)).sum()
    agreed = (p.argmax(-1) == q.argmax(-1)).sum()
    change = (p - q).gather(-1, wanted[:, None]).sum()
    return torch.stack([kl, agreed.double(), change])


@torch.inference_mode()
def _truth(
    model: LoadedModel, whole: Branch, branches: Sequence[Branch], ids: Sequence[int]
) -> tuple[Tensor, list[float]]:
    """The full cache's logits `(n, vocab)` after each of n tokens, and the share of its attention
    that falls on what each branch kept, from one pass."""
    probe = Probe(len(ids))
    most = whole.cache.seen + len(ids)
    policies = [replace(policy, method=probe, budget=most) for policy in whole.policies]
    cache = KVCache(list(whole.cache.layers), whole.cache.seen, states=whole.cache.states)
    reading = Prefill(model, cache, torch.tensor([ids], device=model.device), policies, whole=True)
    shares: list[list[float]] = [[] for _ in branches]
    for index, window in enumerate(model.shape.windows):
        reader = in_one_go(reading.read_layer(index))
        if window is None:
            view = reader.view(index)
            for each, branch in zip(shares, branches, strict=True):
                each.append(
                    attention_kept(view, branch.cache.layers[index].head_groups, whole.cache.seen)
                )
    # Where all layers have windows, nothing is dropped that they would look at.
    return model.logits(reading.hidden[0]), [fmean(each) if each else 1.0 for each in shares]


def attention_kept(view: LayerView, kept: Sequence[KVHeadGroup], seen: int) -> float:
    """Share of the attention to the first `seen` entries that falls on those in `kept`, mean over
    the query heads of one layer.

    Args:
        view: the layer with everything in it, its window the queries of what came after.
        kept: head groups of the same layer, cut.
    """
    positions = {
        head: head_group.positions[0, row, : head_group.used].long()
        for head_group in kept
        for row, head in enumerate(head_group.heads)
    }
    shares = []
    for head_group in view.head_groups:
        for row, head in enumerate(head_group.heads):
            # What all queries together pay to each entry, (heads of the group, seen).
            paid = torch.zeros((), dtype=torch.float64, device=view.window.place)
            for _, weights in view.window.blocks(head_group, row):
                paid = paid + weights[0, :, :, :seen].double().sum(1)
            held = positions.get(head, paid.new_zeros(0, dtype=torch.int64))  # none if deleted
            shares.append(paid[:, held].sum(-1) / paid.sum(-1))
    return float(torch.cat(shares).mean())
