"""Several questions about one document, one after the other in one conversation: is the second
answered as well as the first?"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from random import Random
from typing import Any, ClassVar

from kvlite.bench.case import Puzzle, answer_tokens, asked, longest
from kvlite.bench.fork import Choice
from kvlite.bench.grid import fitting_prose, require_known, require_memory
from kvlite.bench.marks import found, leading
from kvlite.bench.niah import codes
from kvlite.bench.options import TurnsOptions
from kvlite.bench.prose import begun_elsewhere, bundled_prose, hidden_in
from kvlite.bench.questions import KNOWN, UNKNOWN
from kvlite.bench.rows import Cells, Curve, Key, QualityRow, Tally, tallies
from kvlite.bench.task import GridTask, Work
from kvlite.cache.bits import UNCHANGED
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.metrics import GenerationMetrics
from kvlite.conversation.runner import Runner
from kvlite.errors import SettingError
from kvlite.model.load import LoadedModel

# Of a later question in its template and the answer; names and numbers are short.
TURN_TOKENS = 96


@dataclass(frozen=True)
class Interview:
    """A document, and what is asked about it.

    Attributes:
        length: tokens asked for; the first message has at most as many.
        seed: which of several.
        context: the document.
        facts: hidden in it, in this order, evenly spread; each alone its own context.
    """

    length: int
    seed: int
    context: str
    facts: tuple[Puzzle, ...]

    def order(self, number: int) -> list[int]:
        """The questions, as indices of facts, in one of many orders."""
        questions = list(range(len(self.facts)))
        Random(f"order {number} {self.seed}").shuffle(questions)
        return questions

    def depth(self, question: int) -> float:
        """Where in the document a fact is, 0 to 1."""
        return (question + 0.5) / len(self.facts)


def interview(tokenizer: Any, prose: str, length: int, questions: int, seed: int) -> Interview:
    """A document with as many codes as there are questions; each seed has other prose and codes.

    Raises:
        SettingError: it is too short for them.
    """
    facts = codes(Random(f"turns {questions} {seed}"), questions)
    ids = tokenizer.encode(begun_elsewhere(prose, seed), add_special_tokens=False)[:length]
    talk = Interview(length, seed, "", tuple(facts))
    places = [(talk.depth(index), fact.context) for index, fact in enumerate(facts)]
    asked = max((fact.question for fact in facts), key=lambda text: len(tokenizer.encode(text)))

    def build(units: int) -> Puzzle:
        return Puzzle(hidden_in(tokenizer.decode(ids[:units]), places), asked, (), "")

    puzzle = longest(tokenizer, (build, len(ids)), length, f"turns of {questions} questions")
    return replace(talk, context=puzzle.context)


@dataclass(frozen=True, kw_only=True)
class TurnRow(QualityRow):
    """One question of a conversation, and its answer.

    Attributes:
        seed: which document.
        order: in which of many orders its questions are asked.
        place: which one in this order, from 1; the first comes with the document.
        depth: where in the document the answer is, 0 to 1.
        tokens: seen when the question was read.
        hit: the code is in the answer.
        leading: see `marks`.
    """

    KEY: ClassVar = ("length", "seed", "order", "place", "method", "budget", "kv_bits", "recall")
    BOUNDS: ClassVar = {"leading": (0, 1)}

    seed: int
    order: int
    place: int
    depth: float
    tokens: int
    hit: bool
    leading: float
    answer: str

    @property
    def asked(self) -> Key:
        """Which question, whatever the method."""
        return self.length, self.seed, self.order, self.place


@dataclass(kw_only=True)
class Turns(TurnsOptions, GridTask[TurnRow]):
    """Conversations of several questions, in several orders.

    Attributes:
        question: whether the first one is read with the document ("known"), or the document was
            read and cut before ("unknown"), as the app does; what cannot bring back what it drops
            is cut with the first question in any case.
    """

    title: ClassVar = "Questions one after the other"
    row: ClassVar = TurnRow
    curves: ClassVar = (
        Curve("hit", "questions answered (share)", share=True),
        Curve("leading", "leading digits right (share)", share=True),
    )
    from_seeds: ClassVar = True
    records_recall: ClassVar = True

    def __post_init__(self) -> None:
        require_known("--question", [self.question], [KNOWN, UNKNOWN])
        super().__post_init__()

    def options(self) -> dict[str, Any]:
        """What decides the rows; runs from before there was a choice go on."""
        options = super().options()
        if self.question == KNOWN:
            del options["question"]
        return options

    def work(self, runner: Runner) -> list[Work[TurnRow]]:
        prose, tokenizer, tokens = bundled_prose(), runner.tokenizer, max(self.tokens)
        most = self.questions * TURN_TOKENS
        fitting_prose(runner, tokens, most)
        require_memory(self.choices, runner.model, tokens + most)
        make = partial(interview, tokenizer, prose, questions=self.questions)
        interviews = [
            make(length, seed=seed) for seed, length in product(range(self.repeats), self.tokens)
        ]
        choices = self.fitted(runner.model)
        return turns(runner.model, interviews, choices, self.orders, self.question)

    def table(self, rows: Sequence[TurnRow]) -> list[Cells]:
        full = {
            row.asked
            for row in rows
            if (row.method, row.kv_bits) == ("full", UNCHANGED) and row.hit
        }
        return [_line(tally, full) for tally in tallies(rows)]


def turns(
    model: LoadedModel,
    interviews: Iterable[Interview],
    choices: Sequence[Choice],
    orders: int,
    question: str = KNOWN,
) -> list[Work[TurnRow]]:
    """A conversation for each document, order and choice."""
    work: list[Work[TurnRow]] = []
    for each, order, choice in product(interviews, range(orders), choices):
        about = {"length": each.length, "seed": each.seed, "order": order, **choice.columns}
        keys = [TurnRow.key({**about, "place": at + 1}) for at in range(len(each.facts))]
        work.append((keys, partial(_rows, model, each, order, choice, question)))
    return work


def _rows(
    model: LoadedModel, interview: Interview, order: int, choice: Choice, question: str
) -> Iterator[TurnRow]:
    tokenizer, talk = model.tokenizer, Conversation(model, Settings().replace(choice.settings))
    if question == UNKNOWN:
        talk.read_ahead(interview.context)
    for place, index in enumerate(interview.order(order), 1):
        fact = interview.facts[index]
        before = interview.context if place == 1 else ""
        # Without a chat template nothing else stands between an answer and the next question.
        gap = "\n\n" if before or tokenizer.chat_template is None else ""
        right = tokenizer.encode(fact.words, add_special_tokens=False)
        message = before + gap + asked(tokenizer, fact.question)
        pieces = list(talk.stream(message, max_new_tokens=answer_tokens(len(right))))
        text, metrics = "".join(piece.text for piece in pieces), pieces[0].metrics
        _require_recall(choice, metrics)
        yield TurnRow(
            length=interview.length,
            seed=interview.seed,
            order=order,
            place=place,
            depth=interview.depth(index),
            **choice.columns,
            tokens=metrics.seen_tokens,
            entries_mean=metrics.kept_entries_mean,
            kv_bytes=metrics.kv_bytes,
            index_bytes=metrics.index_bytes,
            host_kv_bytes=metrics.host_kv_bytes,
            hit=found(fact.keys, text) == 1,
            leading=leading(fact.keys, text),
            answer=text,
        )


def _require_recall(choice: Choice, metrics: GenerationMetrics) -> None:
    drops = metrics.budget < metrics.seen_tokens
    if choice.recall is not None and drops and not metrics.host_kv_bytes:
        raise SettingError("; ".join(metrics.notes))


def _line(tally: Tally[TurnRow], full: set[Key]) -> Cells:
    rows = tally.rows
    shared = [row for row in rows if row.asked in full]
    outcomes: dict[Key, set[bool]] = {}
    for row in rows:
        outcomes.setdefault((row.seed, row.depth), set()).add(row.hit)
    alike = sum(len(each) == 1 for each in outcomes.values())
    return {
        **tally.setting(),
        "answered": tally.shown_hits(),
        "of the full cache's": f"{sum(row.hit for row in shared)} of {len(shared)}",
        "leading": tally.estimate("leading").shown(),
        "by place": _hits_by(rows, "place"),
        "by order": _hits_by(rows, "order"),
        "alike in all orders": f"{alike} of {len(outcomes)}",
    }


def _hits_by(rows: Sequence[TurnRow], column: str) -> str:
    hits: Counter[int] = Counter()
    for row in rows:
        hits[getattr(row, column)] += row.hit
    return " ".join(str(hits[each]) for each in sorted(hits))
