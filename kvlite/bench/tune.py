"""Settings for one document: what many choices still know of facts hidden in it, and of how its
passages go on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from math import log
from random import Random
from statistics import median
from time import perf_counter
from typing import Any, ClassVar

from kvlite.bench.advice import (
    KINDS,
    Advice,
    TuneRow,
    advise,
    comparable,
    facts_known,
    frontier,
    in_race,
    lost,
    shown_share,
)
from kvlite.bench.batch_decode import step_together, surprise
from kvlite.bench.case import MOST_ANSWER, Made, Recipe, fitted
from kvlite.bench.fidelity import FidelityRow, fidelity
from kvlite.bench.fork import Branch, Choice, parties
from kvlite.bench.grid import choices, recalled, require_memory
from kvlite.bench.niah import codes, hidden
from kvlite.bench.options import TuneOptions
from kvlite.bench.prose import digest
from kvlite.bench.questions import UNKNOWN, read
from kvlite.bench.rows import Cells, Curve, Key, QualityRow, label, tallies
from kvlite.bench.task import Task, Work
from kvlite.config.settings import Settings
from kvlite.config.units import readable
from kvlite.conversation.runner import Runner
from kvlite.documents import read_document
from kvlite.errors import SettingError
from kvlite.methods import parse_method
from kvlite.methods.budget import parse_budget
from kvlite.methods.full import Full
from kvlite.model.load import LoadedModel

# Facts in a prompt, of which one is asked for, and tokens of a passage that are scored.
FACTS, AFTER = 4, 32
ROUNDS, LEAST_TOKENS = 24, 200
_TIMED_STEPS = 3
# Nats of what is as likely as not.
_EVEN = log(2)
# Its multiples, modulo 1, spread evenly however many there are.
_GOLDEN = 0.618


@dataclass(kw_only=True)
class Tune(TuneOptions, Task[TuneRow]):
    """Choices measured on a user's document.

    Attributes:
        text: the document's.
        choices: what is compared in the first part, once the model is known.
    """

    title: ClassVar = "Tuning"
    row: ClassVar = TuneRow
    curves: ClassVar = (Curve("lost", "lost, compared with the full cache (nats a token)"),)
    resumes: ClassVar = True

    def __post_init__(self) -> None:
        """Raises SettingError or DocumentError if an option or the document cannot be used."""
        for text in self.budgets:
            if parse_budget(text).share is None:
                raise SettingError(f"--budget {text} is no share of a text: give one, such as 6%")
        self._choices(1_000_000)
        self.choices: list[Choice] = []
        self.rows: Sequence[Mapping[str, Any]] = ()
        self.text = read_document(self.file).text

    def options(self) -> dict[str, Any]:
        given = super().options()
        del given["most lost"]
        return {**given, "text": digest(self.text)}

    def resume(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows

    def work(self, runner: Runner) -> Iterator[Work[TuneRow]]:
        # A fact and a passage in turns, by those still in the race.
        model = runner.model
        ids: list[int] = runner.tokenizer.encode(self.text)
        # A fifth is left, for passages to begin at several places.
        length = min(self.tokens, model.shape.max_context - MOST_ANSWER, len(ids) * 4 // 5)
        if length < LEAST_TOKENS:
            raise SettingError(
                f"{self.file} has {len(ids):,} tokens, and tuning takes {LEAST_TOKENS * 5 // 4} "
                "at least: name a longer document"
            )
        self.choices = [
            replace(each, method=each.method.fitted(model.shape, model.calibration))
            for each in self._choices(length)
        ]
        require_memory(self.choices, model, length + MOST_ANSWER)
        parts = (self._part(model, ids, length, part) for part in range(ROUNDS))
        return chain.from_iterable(parts)

    def _part(
        self, model: LoadedModel, ids: list[int], length: int, part: int
    ) -> list[Work[TuneRow]]:
        choices = in_race([TuneRow(**row) for row in self.rows], self.choices)
        shared, place = parties(choices), part * _GOLDEN % 1
        prepare = partial(_hidden, model.tokenizer, self.text, length, place, part)
        made = partial(fitted, prepare, length, "tuning")
        fact = Recipe(self.name, "fact", length, place, part, made)
        start = int(place * (len(ids) - length - AFTER))
        ((_, passage),) = fidelity(model, ids, choices, starts={length: [start]}, after=AFTER)
        runs = (partial(_fact, model, fact, shared), partial(_passage, part, passage))
        return [(_keys(kind, part, shared), run) for kind, run in zip(KINDS, runs, strict=True)]

    def doing(self, keys: Sequence[Key]) -> str:
        kind, part = (keys[0][TuneRow.KEY.index(name)] for name in ("kind", "part"))
        what = "a hidden fact" if kind == "fact" else "a passage"
        return f"{self.title}: {what} in part {part + 1}, {len(keys)} settings"

    def table(self, rows: Sequence[TuneRow]) -> list[Cells]:
        # Those in the race that no other beats both in bytes and in what they lose.
        best = frontier(tallies(comparable(rows, self.choices)))
        return [
            {
                "method": label(each.rows[0].method, each.rows[0].kv_bits),
                "budget": shown_share(each),
                "recall": each.rows[0].recall,
                "KV": readable(each.kv_bytes),
                "facts known": facts_known(each.rows),
                "nats lost": f"{lost(each.rows):.3f}",
                "ms a token": f"{median([row.ms for row in each.rows if row.ms] or [0]):.0f}",
            }
            for each in best
        ]

    def summary(self, rows: Sequence[TuneRow]) -> dict[str, Any]:
        found = self.advice(rows)
        settings = None if found is None else {**found.values}
        return {"recommended": settings, "reason": "" if found is None else found.reason}

    def advice(self, rows: Sequence[TuneRow]) -> Advice | None:
        """What to set, if every choice was measured at least once."""
        return advise(rows, self.choices, self.most_lost)

    def _choices(self, length: int) -> list[Choice]:
        """What is compared: the default method in any case, the control only if it is named.

        Raises:
            SettingError: there is no such method, bits or recall.
        """
        specs = list(dict.fromkeys([*self.methods, Settings.method]))
        methods = [parse_method(spec) for spec in specs]
        least = max(method.min_budget for method in methods)
        shares = [parse_budget(text).share or 1 for text in self.budgets]
        entries = list(dict.fromkeys(max(least, round(share * length)) for share in shares))
        ways = recalled(self.recall, self.recall_bits)
        names = {Full.name, *(method.name for method in methods)}
        grid = choices(specs, entries, length, self.kv_bits, ways)
        return [each for each in grid if each.method.name in names]


def _keys(kind: str, part: int, shared: Sequence[Sequence[Choice]]) -> list[Key]:
    about = {"kind": kind, "part": part}
    return [TuneRow.key({**about, **choice.columns}) for choice in chain(*shared)]


def _hidden(tokenizer: Any, text: str, length: int, depth: float, seed: int) -> Made:
    """A fact at a depth of the text, and others like it elsewhere; each seed begins the text at
    another place."""
    random = Random(f"tune {seed}")
    wanted, *others = codes(random, FACTS)
    sentences = [(depth, wanted.context), *((random.random(), each.context) for each in others)]
    return hidden(tokenizer, text, length, seed, wanted, sentences)


def _fact(
    model: LoadedModel, recipe: Recipe, shared: Sequence[Sequence[Choice]]
) -> Iterator[TuneRow]:
    """How much of a surprise a fact's number is, asked for in a turn of its own."""
    case, whole = recipe.case(model.tokenizer), 0.0
    for group in shared:
        branches = read(model, case, UNKNOWN, group)
        nats = surprise(model, branches, case.forced, case.at_keys)
        # What the full cache holds needs no recall, so it is in the first group.
        whole = next((n for n, b in zip(nats, branches, strict=True) if b.choice.is_full), whole)
        for own, branch in zip(nats, branches, strict=True):
            yield TuneRow(
                kind="fact",
                part=recipe.seed,
                length=recipe.length,
                **branch.columns,
                lost=max(0.0, own - whole),
                known=float(own * len(case.at_keys) < _EVEN),
                ms=_step_ms(model, branch),
            )
        del branches  # a host store is freed before the next is filled


def _step_ms(model: LoadedModel, branch: Branch) -> float:
    if branch.recall is not None:
        branch.recall.store.forget_answer()
    going, times = branch.copy(), []
    for _ in range(1 + _TIMED_STEPS):
        begun = perf_counter()
        step_together(model, [going], [int(going.logits.argmax())])
        times.append(perf_counter() - begun)
    return 1000 * median(times[1:])


def _passage(part: int, run: Any) -> Iterator[TuneRow]:
    row: FidelityRow
    for row in run():
        yield TuneRow(
            kind="passage",
            part=part,
            **{each.name: getattr(row, each.name) for each in fields(QualityRow)},
            lost=row.kl,
            known=row.agreement,
        )
