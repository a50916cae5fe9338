"""Questions about a text: needles in a haystack, and tasks after RULER."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, ClassVar

from kvlite.bench.batch_decode import answers, surprise
from kvlite.bench.case import MOST_ANSWER, Case, Made, Recipe, fitted, require_fit
from kvlite.bench.fork import Branch, Choice, parties, read_turns
from kvlite.bench.grid import fitting_prose, require_known, require_length, require_memory
from kvlite.bench.marks import found, leading, rouge_1
from kvlite.bench.options import QuestionOptions
from kvlite.bench.peers import (
    PeerChoice,
    PeerProgram,
    peer_choices,
    require_one_card,
    require_peers,
    versions,
)
from kvlite.bench.prose import bundled_prose
from kvlite.bench.rows import Cells, Curve, QualityRow, Tally, tallies
from kvlite.bench.task import GridTask, Work
from kvlite.config.settings import Settings
from kvlite.conversation.runner import Runner
from kvlite.model.load import LoadedModel

KNOWN, UNKNOWN = "known", "unknown"
ASKED = {KNOWN: (KNOWN,), UNKNOWN: (UNKNOWN,), "both": (KNOWN, UNKNOWN)}


@dataclass(frozen=True, kw_only=True)
class QuestionRow(QualityRow):
    """One answer.

    Attributes:
        task, kind, depth, seed: which case, as in `Case`.
        question: "known" while the cache was cut, or "unknown".
        tokens: the prompt's.
        hit: all keys are in the answer.
        found, leading, rouge: see `marks`.
        reading_s, token_ms: seconds that the prompt took, and milliseconds a token of the answer;
            measured beside peers alone, where each choice reads by itself.
        surprise: nats a token of the keys, had the model answered in the needle's own words; 0 if
            it was sure of each, 10.8 if all of 49,152 tokens were alike to it.
    """

    KEY: ClassVar = (
        "task", "kind", "length", "depth", "seed", "question", "method", "budget", "kv_bits",
        "recall",
    )  # fmt: skip
    BOUNDS: ClassVar = {"found": (0, 1), "leading": (0, 1), "rouge": (0, 1), "surprise": (0, inf)}

    task: str
    kind: str
    depth: float | None
    seed: int
    question: str
    tokens: int
    hit: bool
    found: float
    leading: float
    rouge: float
    surprise: float
    answer: str
    reading_s: float | None = None
    token_ms: float | None = None


@dataclass(kw_only=True)
class QuestionTask(QuestionOptions, GridTask[QuestionRow]):
    """Questions, asked of every choice."""

    row: ClassVar = QuestionRow
    curves: ClassVar = (
        Curve("hit", "all keys found (share)", share=True),
        Curve("surprise", "surprise (nats a key token)"),
    )
    from_seeds: ClassVar = True

    @property
    def takes_prose(self) -> bool:
        """Whether prompts are made of the bundled prose, and no longer than that."""
        return True

    def __post_init__(self) -> None:
        require_known("--question", [self.question], ASKED)
        require_peers(self.peer)
        super().__post_init__()
        self.peer_versions = versions() if self.peer else {}

    def options(self) -> dict[str, Any]:
        options = super().options()
        peers = options.pop("peer")
        return {**options, "peer": peers, "versions": self.peer_versions} if peers else options

    def settings(self, given: Settings) -> Settings:
        if self.peer:
            require_one_card(given, self.peer[0])
        return given

    @property
    @abstractmethod
    def places(self) -> Iterable[tuple[str, float | None]]:
        """Kind and depth of the prompts of each length and seed."""

    @abstractmethod
    def make(
        self, tokenizer: Any, prose: str, kind: str, length: int, depth: float | None, seed: int
    ) -> Made:
        """The text of one prompt."""

    def prompts(self, tokenizer: Any, prose: str) -> list[Recipe]:
        """All prompts; each seed has other prose and other facts."""
        return [
            Recipe(
                self.name, kind, length, depth, seed,
                partial(
                    fitted,
                    partial(self.make, tokenizer, prose, kind, length, depth, seed),
                    length,
                    f"{self.name} {kind}",
                ),
            )
            for seed, length, (kind, depth) in product(
                range(self.repeats), self.tokens, self.places
            )
        ]  # fmt: skip

    def work(self, runner: Runner) -> list[Work[QuestionRow]]:
        """Every prompt and question; choices that share a host store are one unit."""
        model, longest = runner.model, max(self.tokens)
        prompts = self.prompts(model.tokenizer, bundled_prose())
        fits = fitting_prose if self.takes_prose else require_length
        fits(runner, longest, MOST_ANSWER)
        require_fit(prompts, model.tokenizer)
        require_memory(self.choices, model, longest + MOST_ANSWER)
        own, asked = self.fitted(model), ASKED[self.question]
        if not self.peer:
            return ask(model, prompts, own, asked)
        others = peer_choices(self.peer, self.budgets, longest)
        return ask(model, prompts, own, asked, PeerProgram(model, runner.model_path, others))

    def table(self, rows: Sequence[QuestionRow]) -> list[Cells]:
        timed = any(row.reading_s is not None for row in rows)
        return [
            {
                "kind": tally.rows[0].kind,
                "question": tally.rows[0].question,
                **tally.setting(),
                "all found": tally.shown_hits(),
                "found": tally.estimate("found").shown(),
                "leading": tally.estimate("leading").shown(),
                "ROUGE-1": tally.estimate("rouge").shown(),
                "surprise": tally.estimate("surprise").shown(),
                **(_times(tally) if timed else {}),
            }
            for tally in tallies(rows, "kind", "question")
        ]

    def draw(self, rows: Sequence[QuestionRow], folder: Path) -> None:
        """For each kind and question, quality against bytes."""
        from kvlite.bench.plots import draw_quality

        for kind, question in dict.fromkeys((row.kind, row.question) for row in rows):
            own = [row for row in rows if (row.kind, row.question) == (kind, question)]
            title, name = f"{self.name} {kind}, question {question}", f"{kind}-{question}"
            draw_quality(folder / f"quality-{name}.png", title, tallies(own), self.curves)


def _times(tally: Tally[QuestionRow]) -> Cells:
    reading, token = (
        [value for value in tally.values(name) if value is not None]
        for name in ("reading_s", "token_ms")
    )
    return {
        "reading, s": f"{median(reading):.2f}" if reading else "",
        "a token, ms": f"{median(token):.0f}" if token else "",
    }


def ask(
    model: LoadedModel,
    recipes: Sequence[Recipe],
    choices: Sequence[Choice],
    questions: Sequence[str],
    peers: PeerProgram | None = None,
) -> list[Work[QuestionRow]]:
    """Every prompt of every choice; each is read once for all that one host store serves, or once
    for each if there are peers.

    Args:
        questions: "known", "unknown" or both.
        peers: asked besides.
    """

    @lru_cache(maxsize=1)  # units of one prompt follow one another
    def case_of(recipe: Recipe) -> Case:
        return recipe.case(model.tokenizer)

    work: list[Work[QuestionRow]] = []
    for recipe, question in product(recipes, questions):
        about = {**recipe.columns, "question": question}
        for party in [[each] for each in choices] if peers else parties(choices):
            keys = [QuestionRow.key({**about, **choice.columns}) for choice in party]
            own = partial(_rows, model, case_of, recipe, question, party, timed=peers is not None)
            work.append((keys, own))
        if peers:
            for other in peers.choices:
                told = partial(_peer_rows, peers, case_of, recipe, question, other)
                work.append(([QuestionRow.key({**about, **other.columns})], told))
    return work


def read(model: LoadedModel, case: Case, question: str, choices: Sequence[Choice]) -> list[Branch]:
    """Read a prompt as one turn, so that what is kept is chosen with the question in view; or, if
    the question is "unknown", the context first and then the question in a turn of its own.

    Args:
        choices: as in `read_turns`.
    """
    turns = [case.prompt] if question == KNOWN else [case.context, case.question]
    return read_turns(model, turns, choices, reserve=case.new_tokens)


def _rows(
    model: LoadedModel,
    case_of: Callable[[Recipe], Case],
    recipe: Recipe,
    question: str,
    choices: Sequence[Choice],
    *,
    timed: bool,
) -> Iterator[QuestionRow]:
    case, begun = case_of(recipe), perf_counter()
    branches = read(model, case, question, choices)
    seconds = perf_counter() - begun
    held = [branch.columns for branch in branches]
    surprises = surprise(model, branches, case.forced, case.at_keys)
    begun = perf_counter()
    said = answers(model, branches, case.new_tokens)
    token_ms = 1000 * (perf_counter() - begun) / max(1, len(said[0]))
    times = {"reading_s": seconds, "token_ms": token_ms} if timed else {}
    for columns, nats, ids in zip(held, surprises, said, strict=True):
        text: str = model.tokenizer.decode(ids, skip_special_tokens=True)
        yield _row(recipe, question, case, text, surprise=nats, **columns, **times)


def _peer_rows(
    program: PeerProgram,
    case_of: Callable[[Recipe], Case],
    recipe: Recipe,
    question: str,
    choice: PeerChoice,
) -> Iterator[QuestionRow]:
    case = case_of(recipe)
    told = program.told(choice, case, known=question == KNOWN)
    text = program.model.tokenizer.decode(told.pop("ids"), skip_special_tokens=True)
    yield _row(recipe, question, case, text, **choice.columns, **told)


def _row(recipe: Recipe, question: str, case: Case, text: str, **measured: Any) -> QuestionRow:
    share = found(case.keys, text)
    return QuestionRow(
        **recipe.columns,
        **measured,
        question=question,
        tokens=len(case.prompt),
        hit=share == 1,
        found=share,
        leading=leading(case.keys, text),
        rouge=rouge_1(case.words, text),
        answer=text,
    )
