"""Where compression hurts: exercises with exact rules, beside the full cache of the same model."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from random import Random
from statistics import fmean
from typing import Any, ClassVar

from kvlite.bench.exercises import EXERCISES
from kvlite.bench.exercises.exercise import Exercise, Material, Turn
from kvlite.bench.grid import fitting_prose, require_known
from kvlite.bench.intervals import Estimate, mean_of
from kvlite.bench.options import QualityOptions
from kvlite.bench.prose import begun_elsewhere, bundled_prose
from kvlite.bench.rows import Cells, Key, Row
from kvlite.bench.task import Task, Work
from kvlite.cache.bits import UNCHANGED, parse_kv_bits
from kvlite.config.units import readable
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.metrics import Piece
from kvlite.conversation.runner import Runner
from kvlite.errors import SettingError
from kvlite.methods import parse_method
from kvlite.methods.budget import parse_budget
from kvlite.model.answers.grammar import answer_grammar
from kvlite.model.answers.reader import AnswerReader, calls_in
from kvlite.model.chat_template import chat_tokens
from kvlite.model.load import LoadedModel

ALL = "100%"
# Beside what a right answer has, for models that say more.
SPARE_TOKENS = 60
WORSE, BETTER, ALIKE = "worse than full", "better than full", "as full"


@dataclass(frozen=True)
class Way:
    """How an exercise is kept, as a user sets it."""

    method: str
    budget: str
    kv_bits: str
    recall: str

    @property
    def is_full(self) -> bool:
        """Whether everything is kept as it was read: what others are compared with."""
        return self.budget == ALL and self.kv_bits == UNCHANGED

    @property
    def columns(self) -> dict[str, str]:
        """Which way it is, as rows name it."""
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class QualityRow(Row):
    """One exercise, kept in one way.

    Attributes:
        task: which exercise.
        length: tokens asked for; seen, those that were read in all.
        seed: which of several.
        kept: entries of the cache after the last message was read, mean over layers and KV heads.
        kv_bytes, host_kv_bytes: what these took, on the device and in host memory.
        scores: of each turn, the share that is right, 0 to 1.
        answers: what was answered, of each turn.
    """

    KEY: ClassVar = ("task", "length", "seed", "method", "budget", "kv_bits", "recall")

    task: str
    length: int
    seed: int
    method: str
    budget: str
    kv_bits: str
    recall: str
    seen: int
    kept: float
    kv_bytes: int
    host_kv_bytes: int
    scores: list[float]
    answers: list[str]

    @property
    def score(self) -> float:
        """The mean over turns."""
        return fmean(self.scores)

    @property
    def exercise(self) -> Key:
        """Which exercise it was, however it was kept."""
        return self.task, self.length, self.seed

    @property
    def way(self) -> Way:
        """How it was kept."""
        return Way(self.method, self.budget, self.kv_bits, self.recall)


@dataclass(kw_only=True)
class Quality(QualityOptions, Task[QualityRow]):
    """Exercises x budgets x bits x recall."""

    title: ClassVar = "Exercises with exact rules"
    row: ClassVar = QualityRow

    def __post_init__(self) -> None:
        """Raises SettingError if an option is not valid."""
        require_known("--task", self.tasks, EXERCISES)
        require_known("--recall", self.recall, ("auto", "ram", "disk", "off"))
        parse_method(self.method)
        for budget in self.budgets:
            parse_budget(budget)
        for bits in self.kv_bits:
            parse_kv_bits(bits)
        every = product([self.method], self.budgets, self.kv_bits, self.recall)
        # What keeps everything has nothing to recall.
        full = Way(self.method, ALL, UNCHANGED, "off")
        ways = (full if Way(*each).is_full else Way(*each) for each in every)
        self.ways = [*dict.fromkeys([full, *ways])]

    def work(self, runner: Runner) -> list[Work[QualityRow]]:
        without = [each for each in self.tasks or EXERCISES if each != "tools"]
        knows_tools = runner.model.answer_form.calls is not None
        tasks = self.tasks or ([*EXERCISES] if knows_tools else without)
        if "tools" in tasks and not knows_tools:
            others = ",".join(without) or "copy-many"
            raise SettingError(f"this model's chat template knows no tools: give --task {others}")
        fitting_prose(runner, max(self.tokens), 0)
        return [
            (
                [QualityRow.key({"task": t, "length": length, "seed": seed, **way.columns})],
                partial(_rows, runner, t, length, seed, way),
            )
            for t, length, seed, way in product(tasks, self.tokens, range(self.cases), self.ways)
        ]

    def doing(self, keys: Sequence[Key]) -> str:
        task, length, *_ = keys[0]
        return f"{task}, {length:,} tokens"

    def table(self, rows: Sequence[QualityRow]) -> list[Cells]:
        full = _full(rows)
        return [_line(group, full) for group in _groups(rows)]

    def summary(self, rows: Sequence[QualityRow]) -> dict[str, Any]:
        full = _full(rows)
        return {"worse": [_name(each) for each in _groups(rows) if _verdict(each, full) == WORSE]}


def exercise(model: LoadedModel, task: str, length: int, seed: int) -> Exercise:
    """An exercise of a seed, whose texts have some `length` tokens. Raises SettingError if it is
    too short."""

    random, prose = Random(f"{task} {seed}"), begun_elsewhere(bundled_prose(), seed)
    return EXERCISES[task](Material(random, prose, length, model.tokenizer))


def _rows(runner: Runner, task: str, length: int, seed: int, way: Way) -> Iterator[QualityRow]:
    made = exercise(runner.model, task, length, seed)
    talk = runner.conversation(**way.columns, temperature=0.0)
    answers, pieces = list[str](), list[Piece]()
    for turn in made.turns:
        answer, pieces = _answer(talk, made, turn)
        answers.append(answer)
    metrics = pieces[0].metrics
    yield QualityRow(
        task=task,
        length=length,
        seed=seed,
        **way.columns,
        seen=metrics.seen_tokens,
        kept=metrics.kept_entries_mean,
        kv_bytes=metrics.kv_bytes,
        host_kv_bytes=metrics.host_kv_bytes,
        scores=[turn.check(said) for turn, said in zip(made.turns, answers, strict=True)],
        answers=answers,
    )


def _answer(talk: Conversation, made: Exercise, turn: Turn) -> tuple[str, list[Piece]]:
    """The text of an answer; where there are tools, one of which must be called, the call as
    JSON."""
    model = talk.model
    right = len(model.tokenizer.encode(turn.right, add_special_tokens=False))
    most = turn.new_tokens or right + right // 4 + SPARE_TOKENS
    if not made.tools:
        pieces = list(talk.stream(turn.message, max_new_tokens=most, schema=turn.schema))
        return "".join(piece.text for piece in pieces), pieces
    messages = [*made.before, {"role": "user", "content": turn.message}]
    ids = chat_tokens(model.tokenizer, messages, [tool.plain() for tool in made.tools])
    called = answer_grammar(
        model.answer_form,
        model.tokenizer,
        model.vocabulary.trie,
        made.tools,
        needed=True,
        several=False,
        ends=model.stop_ids,
    )
    pieces = list(talk.stream_tokens(ids, max_new_tokens=most, schema=called))
    reader = AnswerReader(model.answer_form, made.tools)
    parts = [part for piece in pieces for part in reader.push(piece.raw)] + reader.flush()
    name, arguments = next(iter(calls_in(parts)), ("", ""))
    return f"[{json.dumps(name)}, {arguments}]", pieces


def _groups(rows: Sequence[QualityRow]) -> list[list[QualityRow]]:
    groups: dict[Key, list[QualityRow]] = {}
    for row in rows:
        groups.setdefault((row.task, row.length, row.way), []).append(row)
    return [*groups.values()]


def _full(rows: Sequence[QualityRow]) -> dict[Key, float]:
    """What the full cache scored, by exercise."""
    return {row.exercise: row.score for row in rows if row.way.is_full}


def _beside(rows: Sequence[QualityRow], full: dict[Key, float]) -> Estimate | None:
    """How much better than the full cache, exercise by exercise; None if there is none."""
    differences = [row.score - full[row.exercise] for row in rows if row.exercise in full]
    return mean_of(differences, -1, 1) if differences else None


def _verdict(rows: Sequence[QualityRow], full: dict[Key, float]) -> str:
    beside = _beside(rows, full)
    if rows[0].way.is_full:
        return "full"
    if beside is None or beside.low is None or beside.high is None:
        return "?"
    return WORSE if beside.high < 0 else BETTER if beside.low > 0 else ALIKE


def _name(rows: Sequence[QualityRow]) -> dict[str, Any]:
    return {"task": rows[0].task, "length": rows[0].length, **rows[0].way.columns}


def _line(rows: Sequence[QualityRow], full: dict[Key, float]) -> Cells:
    row, beside = rows[0], _beside(rows, full)
    shown = "" if row.way.is_full or beside is None else beside.shown()
    return {
        "task": row.task,
        "verdict": _verdict(rows, full),
        "tokens": f"{row.length:,}",
        "budget": row.budget,
        "bits": row.kv_bits,
        "recall": row.recall,
        "method": row.method,
        "cases": f"{len(rows)}",
        "right": mean_of([each.score for each in rows], 0, 1).shown(),
        "beside full": shown,
        "kept": f"{fmean(each.kept / each.seen for each in rows):.0%}",
        "KV": readable(fmean(each.kv_bytes for each in rows)),
    }
