"""How far next-token distributions move when a cache is cut, on real text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvlite.bench.batch_decode import told
from kvlite.bench.fork import Branch, Choice
from kvlite.bench.grid import fitted, label
from kvlite.bench.intervals import Estimate, mean_of
from kvlite.bench.multi_turn import parties, read_turns
from kvlite.cache import KVCache, KVHeadGroup
from kvlite.config.units import readable
from kvlite.engine.prefill import Prefill
from kvlite.engine.probe import Probe
from kvlite.errors import SettingError
from kvlite.methods.base import LayerView
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.model.load import LoadedModel


@dataclass(frozen=True)
class FidelityRow:
    """One part of a text, read and cut by one method, and the tokens after it.

    Attributes:
        length: tokens read before the cut.
        start: index in the text of the first of them.
        method, budget, kv_bits: as asked for.
        recall: "off", or how what was dropped came back, as in "128 of 4 bits".
        scored: distributions compared, each after one more token of the text; the first, right
            after the cut, is left out, since most methods read exactly.
        entries_mean, kv_bytes: what the cache held after the cut.
        index_bytes, host_kv_bytes: what recall took beside it then, on the device and in host
            memory.
        kl: mean KL divergence in nats of the method's distribution from the full cache's.
        agreement: share of distributions whose likeliest token is the full cache's.
        nll_change: mean rise of the text's own negative log-likelihood, nats a token.
        attention_kept: of the attention that the tokens after the cut pay, in the full cache, to
            those before it, the share that falls on what the cut kept; mean over query heads and
            over the layers that see everything; 1 if there are none.
    """

    KEY: ClassVar = ("length", "start", "method", "budget", "kv_bits", "recall")

    length: int
    start: int
    method: str
    budget: int
    kv_bits: str
    recall: str
    scored: int
    entries_mean: float
    kv_bytes: int
    index_bytes: int
    host_kv_bytes: int
    kl: float
    agreement: float
    nll_change: float
    attention_kept: float

    def to_json(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


def fidelity(
    model: LoadedModel,
    ids: Sequence[int],
    choices: Sequence[Choice],
    *,
    lengths: Sequence[int],
    starts: Mapping[int, Sequence[int]],
    after: int,
    done: frozenset[tuple[Any, ...]] = frozenset(),
) -> Iterator[FidelityRow]:
    """Every row of the grid that is not done yet; each part is read once for all choices that one
    host store serves.

    Args:
        ids: the text.
        choices: what is compared; `full`, not quantized, is one of them.
        starts: of each length, where parts begin; `length + after` tokens follow each.
        after: tokens told after the cut, at least 2.
    """
    choices = fitted(choices, model)
    for length in lengths:
        for start in starts[length]:
            keys = [(length, start, *_key(each)) for each in choices]
            if done.issuperset(keys):
                continue
            part = list(ids[start : start + length + after])
            rows = _rows(model, part, choices, length, start)
            yield from (row for index, row in rows if keys[index] not in done)


def _key(choice: Choice) -> tuple[Any, ...]:
    return choice.method.spec, choice.budget, choice.kv_bits, choice.recalls


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
        raise SettingError(
            f"--tokens {max(lengths)} and --after {after} are too many: give up to {limit:,} "
            f"together (the text has {text:,} tokens, the model was trained for {trained:,})"
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
    choices: Sequence[Choice],
    length: int,
    start: int,
) -> Iterator[tuple[int, FidelityRow]]:
    """A row for each choice, by its index."""
    after, whole = part[length:], _whole(choices)
    truth: Branch | None = None
    for party in parties(choices):
        own = [choices[index] for index in party]
        branches = read_turns(model, [part[:length]], own, reserve=len(after))
        truth = truth or branches[party.index(whole)]
        rows = _beside(model, truth, branches, after, length, start)
        del branches  # a host store is let go before the next is filled
        yield from zip(party, rows, strict=True)


def _whole(choices: Sequence[Choice]) -> int:
    """Which of them is the yardstick; nothing it holds is recalled, so the first party has it."""
    return next(
        index
        for index, choice in enumerate(choices)
        if choice.method.name == "full" and choice.bits is None
    )


def _beside(
    model: LoadedModel,
    whole: Branch,
    branches: Sequence[Branch],
    after: list[int],
    length: int,
    start: int,
) -> list[FidelityRow]:
    """Rows of branches that have read the same as the full cache."""
    truth, kept = _truth(model, whole, branches, after[:-1])
    sums = torch.zeros(len(branches), 3, dtype=torch.float64)

    def judge(index: int, at: int, logits: Tensor) -> None:
        if at:
            wanted = torch.tensor(after[at : at + len(logits)], device=logits.device)
            sums[index] += _distance(truth[at - 1 : at - 1 + len(logits)], logits, wanted).cpu()

    told(model, branches, after, judge)
    scored = len(after) - 1
    return [
        FidelityRow(
            length=length,
            start=start,
            method=branch.choice.method.spec,
            budget=branch.choice.budget,
            kv_bits=branch.choice.kv_bits,
            recall=branch.choice.recalls,
            scored=scored,
            entries_mean=branch.cache.entries_mean,
            kv_bytes=branch.cache.nbytes,
            index_bytes=branch.index_bytes,
            host_kv_bytes=branch.host_kv_bytes,
            kl=kl / scored,
            agreement=agreed / scored,
            nll_change=change / scored,
            attention_kept=share,
        )
        for branch, (kl, agreed, change), share in zip(branches, sums.tolist(), kept, strict=True)
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
    policies = [LayerPolicy(probe, most, policy.window) for policy in whole.policies]
    cache = KVCache(list(whole.cache.layers), whole.cache.seen)
    reading = Prefill(model, cache, torch.tensor([ids], device=model.device), policies, whole=True)
    shares: list[list[float]] = [[] for _ in branches]
    for index, window in enumerate(model.shape.windows):
        reader = reading.read_layer(index)
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
            weights = _attention(view, head_group, row, seen)
            held = positions.get(head, weights.new_zeros(0, dtype=torch.int64))  # none if deleted
            shares.append(weights[:, held].sum(-1) / weights.sum(-1))
    return float(torch.cat(shares).mean())


def _attention(view: LayerView, head_group: KVHeadGroup, row: int, seen: int) -> Tensor:
    """What all queries together pay to each of the first entries, `(heads of the group, seen)`
    float64."""
    total = torch.zeros((), dtype=torch.float64, device=view.window.place)
    for _, weights in view.window.blocks(head_group, row):
        total = total + weights[0, :, :, :seen].double().sum(1)
    return total


@dataclass(frozen=True)
class FidelityTally:
    """All parts of one length, method, budget and recall: means of the rows'; recall's index on
    the device is part of `kv_bytes`."""

    length: int
    method: str
    budget: int
    kv_bits: str
    recall: str
    parts: int
    kl: Estimate
    agreement: Estimate
    nll_change: Estimate
    attention_kept: Estimate
    entries_mean: float
    kv_bytes: float

    def cells(self) -> dict[str, str]:
        """What a table shows, by column."""
        return {
            "tokens": f"{self.length:,}",
            "method": label(self.method, self.kv_bits),
            "budget": "all" if self.method == "full" else f"{self.budget:,}",
            "recall": self.recall,
            "entries": f"{self.entries_mean:,.0f}",
            "KV": readable(self.kv_bytes),
            "parts": str(self.parts),
            "KL, nats": self.kl.shown(3),
            "same top token": self.agreement.shown(3),
            "change of NLL": self.nll_change.shown(3),
            "attention kept": self.attention_kept.shown(3),
        }


def tallies(rows: Sequence[FidelityRow]) -> list[FidelityTally]:
    """Rows added up over the parts of a text, in their order."""
    groups: dict[tuple[int, str, int, str, str], list[FidelityRow]] = {}
    for row in rows:
        group = (row.length, row.method, row.budget, row.kv_bits, row.recall)
        groups.setdefault(group, []).append(row)
    return [
        FidelityTally(
            *group,
            parts=len(cells),
            kl=mean_of([row.kl for row in cells], 0),
            agreement=mean_of([row.agreement for row in cells], 0, 1),
            nll_change=mean_of([row.nll_change for row in cells]),
            attention_kept=mean_of([row.attention_kept for row in cells], 0, 1),
            entries_mean=fmean(row.entries_mean for row in cells),
            kv_bytes=fmean(row.kv_bytes + row.index_bytes for row in cells),
        )
        for group, cells in groups.items()
    ]
