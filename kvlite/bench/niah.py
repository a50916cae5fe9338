"""Needle in a haystack: a fact hidden in real prose, asked for at the end of the prompt.

As in "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
section 5.3, and KV-X, section 4: depth x length x method x budget. A hit is strict: the whole
key must be in the answer. Where budgets are small and nothing hits, the surprise at the key tells
methods apart.
"""

import copy
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import product
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from kvlite.bench.fork import read_once
from kvlite.cache import KVCache
from kvlite.engine.decode import decode_step
from kvlite.ledger import readable
from kvlite.methods import Method
from kvlite.methods.rules import Rule
from kvlite.model.load import LoadedModel
from kvlite.runner import Runner

Kind = Literal["number", "sentence"]

_SIGHTS = "eat a sandwich and sit in Dolores Park on a sunny day"
NEW_TOKENS = 40


@dataclass(frozen=True)
class Needle:
    """What is hidden, what is asked, and what the answer must hold."""

    text: str
    question: str
    key: str


@dataclass(frozen=True)
class Row:
    """One answer of the grid.

    Attributes:
        kind, length, depth: which prompt, as asked for.
        tokens: its tokens as read, at most `length`.
        method, budget: as asked for.
        entries_mean, kv_bytes: what the cache really held after reading.
        hit: the key is in the answer.
        leading: share of a number's digits right from the left; of a sentence's words found.
        surprise: nats a token of the key, had the model begun its answer with the needle's words;
            0 if it was sure of each, 10.8 if all of 49,152 tokens were alike to it.
        answer: what was said.
    """

    kind: Kind
    length: int
    depth: float
    tokens: int
    method: str
    budget: int
    entries_mean: float
    kv_bytes: int
    hit: bool
    leading: float
    surprise: float
    answer: str

    def to_json(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


@dataclass(frozen=True)
class Tally:
    """All depths of one kind, length, method and budget.

    Attributes:
        hits, asked: needles found, of how many.
        leading, surprise: as in `Row`, mean over the depths.
        entries_mean, kv_bytes: as in `Row`, mean over the depths.
    """

    kind: Kind
    tokens: int
    method: str
    budget: int
    hits: int
    asked: int
    leading: float
    surprise: float
    entries_mean: float
    kv_bytes: float

    def cells(self) -> dict[str, str]:
        """What a table shows, by column."""
        return {
            "needle": self.kind,
            "tokens": f"{self.tokens:,}",
            "method": self.method,
            "budget": f"{self.budget:,}",
            "entries": f"{self.entries_mean:,.0f}",
            "KV": readable(self.kv_bytes),
            "found": f"{self.hits} of {self.asked}",
            "leading": f"{self.leading:.2f}",
            "surprise": f"{self.surprise:.2f}",
        }


def tallies(rows: Sequence[Row]) -> list[Tally]:
    """Rows added up over the depths, in their order."""
    groups: dict[tuple[Kind, int, str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.length, row.method, row.budget), []).append(row)
    return [
        Tally(
            kind=kind,
            tokens=length,
            method=method,
            budget=budget,
            hits=sum(row.hit for row in cells),
            asked=len(cells),
            leading=fmean(row.leading for row in cells),
            surprise=fmean(row.surprise for row in cells),
            entries_mean=fmean(row.entries_mean for row in cells),
            kv_bytes=fmean(row.kv_bytes for row in cells),
        )
        for (kind, length, method, budget), cells in groups.items()
    ]


def bundled_prose() -> str:
    """Some 12,000 tokens of real, public-domain prose: the Constitution of the United States
    with its amendments and the Declaration of Independence."""
    return files("kvlite.bench").joinpath("prose.txt").read_text(encoding="utf-8")


def make_needle(kind: Kind, seed: int) -> Needle:
    """The needle of a seed."""
    if kind == "sentence":
        return Needle(
            f"The best thing to do in San Francisco is {_SIGHTS}.",
            "What is the best thing to do in San Francisco?",
            _SIGHTS,
        )
    number = str(random.Random(seed).randrange(1_000_000, 10_000_000))
    return Needle(
        f"The secret passcode of the harbour office is {number}.",
        "What is the secret passcode of the harbour office?",
        number,
    )


def prompt_ids(runner: Runner, prose: str, needle: Needle, tokens: int, depth: float) -> list[int]:
    """A prompt of at most `tokens`: prose with the needle at `depth` (0 to 1) of it, moved to the
    next end of a sentence, and the question, in the model's chat template."""
    tokenizer = runner.tokenizer
    frame = len(_templated(tokenizer, f"{needle.text}\n\n{needle.question}"))
    hay = tokenizer.decode(tokenizer.encode(prose)[: tokens - frame])
    ends = [match.end() for match in re.finditer(r"\.\s+", hay)]
    at = min(ends, key=lambda end: abs(end - depth * len(hay)), default=0) if depth > 0 else 0
    text = f"{hay[:at]}{needle.text} {hay[at:]}\n\n{needle.question}"
    return _templated(tokenizer, text)


def _templated(tokenizer: Any, text: str) -> list[int]:
    if tokenizer.chat_template is None:
        ids: list[int] = tokenizer.encode(f"{text}\nAnswer:")
        return ids
    message = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    templated: list[int] = tokenizer.encode(rendered, add_special_tokens=False)
    return templated


def niah(
    runner: Runner,
    choices: Sequence[tuple[Method, int]],
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    kinds: Sequence[Kind],
    prose: str,
) -> Iterator[Row]:
    """Every cell of the grid, as it is done. Each prompt is read once for all choices.

    Args:
        choices: methods and mean budgets (`full` with any).
    """
    for length, kind, (index, depth) in product(lengths, kinds, enumerate(depths)):
        needle = make_needle(kind, index)
        ids = prompt_ids(runner, prose, needle, length, depth)
        model = runner.model
        logits, branches = read_once(model, ids, choices, reserve=NEW_TOKENS)
        for (method, budget), (cache, rules) in zip(choices, branches, strict=True):
            held, nbytes = cache.entries_mean, cache.nbytes
            surprise = _surprise(runner, needle, logits, copy.deepcopy(cache), [*rules])
            said = _answer(model, int(logits.argmax(-1)), cache, rules)
            text = runner.tokenizer.decode(said, skip_special_tokens=True)
            yield Row(
                kind=kind,
                length=length,
                depth=depth,
                tokens=len(ids),
                method=method.spec,
                budget=budget,
                entries_mean=held,
                kv_bytes=nbytes,
                hit=needle.key.lower() in text.lower(),
                leading=_leading(kind, needle.key, text),
                surprise=surprise,
                answer=text,
            )


def _answer(
    model: LoadedModel,
    token: int,
    cache: KVCache,
    rules: list[Rule],
) -> list[int]:
    """Greedy tokens from the first one on, the ending one left out."""
    said: list[int] = []
    while token not in model.stop_ids and len(said) < NEW_TOKENS:
        said.append(token)
        step = torch.tensor([token], device=model.device)
        token = int(decode_step(model, cache, step, rules).argmax(-1))
    return said


def _surprise(
    runner: Runner, needle: Needle, logits: Tensor, cache: KVCache, rules: list[Rule]
) -> float:
    """Nats a token of the key, with the needle's own words put in the model's mouth."""
    forced = runner.tokenizer(needle.text, add_special_tokens=False, return_offsets_mapping=True)
    begin = needle.text.index(needle.key)
    end = begin + len(needle.key)
    nats: list[float] = []
    for token, (low, high) in zip(forced["input_ids"], forced["offset_mapping"], strict=True):
        if low >= end:
            break
        if high > begin:
            nats.append(-float(logits.log_softmax(-1)[0, token]))
        step = torch.tensor([token], device=runner.model.device)
        logits = decode_step(runner.model, cache, step, rules)
    return fmean(nats)


def _leading(kind: Kind, key: str, text: str) -> float:
    if kind == "sentence":
        words = set(re.findall(r"\w+", text.lower()))
        wanted = re.findall(r"\w+", key.lower())
        return sum(word in words for word in wanted) / len(wanted)
    best = 0
    for number in re.findall(r"\d+", text.replace(",", "")):
        same = next((i for i, (a, b) in enumerate(zip(key, number, strict=False)) if a != b), None)
        best = max(best, min(len(key), len(number)) if same is None else same)
    return best / len(key)
