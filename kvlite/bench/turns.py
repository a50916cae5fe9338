"""Several questions about one document, one after the other in one conversation: is the second
answered as well as the first?"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from random import Random
from statistics import fmean
from typing import Any, ClassVar

from kvlite.bench.case import Made, Puzzle, Recipe, answer_tokens, asked
from kvlite.bench.fork import Choice
from kvlite.bench.grid import fitted, label, require_memory, require_room
from kvlite.bench.intervals import Estimate, mean_of, share_of
from kvlite.bench.marks import found, leading
from kvlite.bench.niah import codes
from kvlite.bench.prose import begun_elsewhere, hidden_in
from kvlite.cache.bits import UNCHANGED
from kvlite.config.settings import Settings
from kvlite.config.units import readable
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
    """A document with as many codes as there are questions; each seed has other prose and other
    codes.

    Raises:
        SettingError: it is too short for them.
    """
    facts = codes(Random(f"turns {questions} {seed}"), questions)
    text = begun_elsewhere(prose, seed)
    ids = tokenizer.encode(text, add_special_tokens=False)[:length]
    made = Interview(length, seed, "", tuple(facts))
    places = [(made.depth(index), fact.context) for index, fact in enumerate(facts)]
    longest = max((fact.question for fact in facts), key=lambda text: len(tokenizer.encode(text)))

    def build(units: int) -> Puzzle:
        hay = hidden_in(tokenizer.decode(ids[:units]), places)
        return Puzzle(hay, longest, (), "")

    def prepare() -> Made:
        return build, len(ids)

    recipe = Recipe("turns", f"of {questions} questions", length, None, seed, prepare)
    return replace(made, context=recipe.puzzle(tokenizer).context)


@dataclass(frozen=True)
class TurnRow:
    """One question of a conversation, and its answer.

    Attributes:
        length, seed: which document, as in `Interview`.
        order: in which of many orders its questions are asked.
        place: which one in this order, from 1; the first comes with the document.
        depth: where in the document the answer is, 0 to 1.
        method, budget, kv_bits: as asked for.
        recall: "off", or how what was dropped came back, as in "128 of 4 bits".
        tokens: seen when the question was read.
        entries_mean, kv_bytes: what the cache held then.
        index_bytes, host_kv_bytes: what recall took beside it, on the device and in host memory.
        hit: the code is in the answer.
        leading: see `marks`.
        answer: what was said.
    """

    KEY: ClassVar = ("length", "seed", "order", "place", "method", "budget", "kv_bits", "recall")

    length: int
    seed: int
    order: int
    place: int
    depth: float
    method: str
    budget: int
    kv_bits: str
    recall: str
    tokens: int
    entries_mean: float
    kv_bytes: int
    index_bytes: int
    host_kv_bytes: int
    hit: bool
    leading: float
    answer: str

    def to_json(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


def measured(
    runner: Runner,
    prose: str,
    choices: Sequence[Choice],
    *,
    lengths: Sequence[int],
    questions: int,
    orders: int,
    repeats: int,
    done: frozenset[tuple[Any, ...]],
) -> tuple[int, Iterator[TurnRow]]:
    """How many rows a grid has, and `turns` for those that are missing.

    Args:
        prose: what documents are made of.

    Raises:
        SettingError: documents are too long for the prose or the model, or too short for the
            questions; or host memory is too small for recall.
    """
    tokenizer, most = runner.tokenizer, questions * TURN_TOKENS
    held = len(tokenizer.encode(prose))
    require_room(max(lengths), most, held, runner.shape.max_context)
    require_memory(choices, runner.model, max(lengths) + most)
    make = partial(interview, tokenizer, prose)
    make(min(lengths), questions, 0)
    interviews = (
        make(length, questions, seed) for seed, length in product(range(repeats), lengths)
    )
    total = len(lengths) * questions * orders * repeats * len(choices)
    return total, turns(runner.model, interviews, choices, orders, done)


def turns(
    model: LoadedModel,
    interviews: Iterable[Interview],
    choices: Sequence[Choice],
    orders: int,
    done: frozenset[tuple[Any, ...]] = frozenset(),
) -> Iterator[TurnRow]:
    """Every row of the grid that is not done yet, a conversation for each order and choice; one
    whose rows are only partly there is held again.

    Args:
        choices: what is compared.
        orders: how many orders of the questions.
    """
    choices = fitted(choices, model)
    for each in interviews:
        for order, choice in product(range(orders), choices):
            how = (choice.method.spec, choice.budget, choice.kv_bits, choice.recalls)
            keys = [(each.length, each.seed, order, at + 1, *how) for at in range(len(each.facts))]
            if done.issuperset(keys):
                continue
            rows = _rows(model, each, order, choice)
            yield from (row for row, key in zip(rows, keys, strict=True) if key not in done)


def _rows(
    model: LoadedModel, interview: Interview, order: int, choice: Choice
) -> Iterator[TurnRow]:
    """One conversation, question by question."""
    tokenizer, talk = model.tokenizer, Conversation(model, _settings(choice))
    for place, question in enumerate(interview.order(order), 1):
        fact = interview.facts[question]
        before = interview.context if place == 1 else ""
        # Without a chat template nothing else stands between an answer and the next question.
        gap = "\n\n" if before or tokenizer.chat_template is None else ""
        right = tokenizer.encode(fact.words, add_special_tokens=False)
        pieces = list(
            talk.stream(
                before + gap + asked(tokenizer, fact.question),
                max_new_tokens=answer_tokens(len(right)),
            )
        )
        text, metrics = "".join(piece.text for piece in pieces), pieces[0].metrics
        _require_recall(choice, metrics)
        yield TurnRow(
            length=interview.length,
            seed=interview.seed,
            order=order,
            place=place,
            depth=interview.depth(question),
            method=choice.method.spec,
            budget=choice.budget,
            kv_bits=choice.kv_bits,
            recall=choice.recalls,
            tokens=metrics.seen_tokens,
            entries_mean=metrics.kept_entries_mean,
            kv_bytes=metrics.kv_bytes,
            index_bytes=metrics.index_bytes,
            host_kv_bytes=metrics.host_kv_bytes,
            hit=found(fact.keys, text) == 1,
            leading=leading(fact.keys, text),
            answer=text,
        )


def _settings(choice: Choice) -> Settings:
    """A choice as a user would set it."""
    plain = Settings(
        method=choice.method.spec,
        budget=str(choice.budget),
        kv_bits=choice.kv_bits,
        recall="off",
    )
    if choice.recall is None:
        return plain
    bits = UNCHANGED if choice.recall.bits is None else str(choice.recall.bits)
    return plain.replace(
        {"recall": "ram", "recall_entries": choice.recall.entries, "recall_bits": bits}
    )


def _require_recall(choice: Choice, metrics: GenerationMetrics) -> None:
    """Raises SettingError if a conversation that should recall forgets."""
    drops = metrics.budget < metrics.seen_tokens
    if choice.recall is not None and drops and not metrics.host_kv_bytes:
        raise SettingError("; ".join(metrics.notes))


@dataclass(frozen=True)
class TurnTally:
    """All questions of one length, method, budget and recall.

    Attributes:
        asked, hits: questions, and how many were answered.
        hit, leading: means of the rows'.
        of_full: how many of those that the full cache answered, in the same order and place, and
            how many these are.
        by_order: hits in each order.
        by_place: hits at each place.
        alike: questions answered in all orders or in none, and how many there are.
        entries_mean: mean of the rows'.
        kv_bytes: mean of the rows', recall's index on the device included.
    """

    length: int
    method: str
    budget: int
    kv_bits: str
    recall: str
    asked: int
    hits: int
    hit: Estimate
    leading: Estimate
    of_full: tuple[int, int]
    by_order: tuple[int, ...]
    by_place: tuple[int, ...]
    alike: tuple[int, int]
    entries_mean: float
    kv_bytes: float

    def cells(self) -> dict[str, str]:
        """What a table shows, by column."""
        low, high = self.hit.low or 0.0, self.hit.high or 0.0
        return {
            "tokens": f"{self.length:,}",
            "method": label(self.method, self.kv_bits),
            "budget": "all" if self.method == "full" else f"{self.budget:,}",
            "recall": self.recall,
            "entries": f"{self.entries_mean:,.0f}",
            "KV": readable(self.kv_bytes),
            "answered": f"{self.hits} of {self.asked} ({low:.0%} to {high:.0%})",
            "of the full cache's": f"{self.of_full[0]} of {self.of_full[1]}",
            "leading": self.leading.shown(),
            "by place": " ".join(map(str, self.by_place)),
            "by order": " ".join(map(str, self.by_order)),
            "alike in all orders": f"{self.alike[0]} of {self.alike[1]}",
        }


def tallies(rows: Iterable[TurnRow]) -> list[TurnTally]:
    """Rows added up over documents, orders and places, in their order."""
    groups: dict[tuple[int, str, int, str, str], list[TurnRow]] = {}
    for row in rows:
        group = (row.length, row.method, row.budget, row.kv_bits, row.recall)
        groups.setdefault(group, []).append(row)
    known = {
        _asked(row)
        for (_, method, _, kv_bits, _), cells in groups.items()
        for row in cells
        if (method, kv_bits) == ("full", UNCHANGED) and row.hit
    }
    return [_tally(group, cells, known) for group, cells in groups.items()]


def _asked(row: TurnRow) -> tuple[int, int, int, int]:
    return row.length, row.seed, row.order, row.place


def _tally(
    group: tuple[int, str, int, str, str],
    rows: list[TurnRow],
    known: set[tuple[int, int, int, int]],
) -> TurnTally:
    """Rows of one group.

    Args:
        known: what the full cache answered.
    """
    hits, shared = sum(row.hit for row in rows), [row for row in rows if _asked(row) in known]
    orders, places = (
        Counter(dict.fromkeys(sorted(values), 0))
        for values in ({row.order for row in rows}, {row.place for row in rows})
    )
    outcomes: dict[tuple[int, float], set[bool]] = {}
    for row in rows:
        orders[row.order] += row.hit
        places[row.place] += row.hit
        outcomes.setdefault((row.seed, row.depth), set()).add(row.hit)
    return TurnTally(
        *group,
        asked=len(rows),
        hits=hits,
        hit=share_of(hits, len(rows)),
        leading=mean_of([row.leading for row in rows], 0, 1),
        of_full=(sum(row.hit for row in shared), len(shared)),
        by_order=tuple(orders.values()),
        by_place=tuple(places.values()),
        alike=(sum(len(each) == 1 for each in outcomes.values()), len(outcomes)),
        entries_mean=fmean(row.entries_mean for row in rows),
        kv_bytes=fmean(row.kv_bytes + row.index_bytes for row in rows),
    )
