"""Questions about a text: needles in a haystack, and tasks after RULER."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from math import inf
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

from kvlite.bench.batch_decode import answers, surprise
from kvlite.bench.case import MOST_ANSWER, Case, Made, Recipe, fitted, require_fit
from kvlite.bench.fork import Branch, Choice, parties, read_turns
from kvlite.bench.grid import fitting_prose, require_known, require_memory
from kvlite.bench.marks import found, leading, rouge_1
from kvlite.bench.prose import bundled_prose
from kvlite.bench.rows import Cells, Curve, QualityRow, tallies
from kvlite.bench.task import GridTask, Work
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


@dataclass(kw_only=True)
class QuestionTask(GridTask[QuestionRow]):
    """Questions, asked of every choice.

    Attributes:
        question: a key of `ASKED`.
        repeats: prompts of each kind, from different seeds.
    """

    row: ClassVar = QuestionRow
    curves: ClassVar = (
        Curve("hit", "all keys found (share)", share=True),
        Curve("surprise", "surprise (nats a key token)"),
    )
    from_seeds: ClassVar = True

    question: str
    repeats: int

    def __post_init__(self) -> None:
        require_known("--question", [self.question], ASKED)
        super().__post_init__()

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
        fitting_prose(runner, longest, MOST_ANSWER)
        require_fit(prompts, model.tokenizer)
        require_memory(self.choices, model, longest + MOST_ANSWER)
        return ask(model, prompts, self.fitted(model), ASKED[self.question])

    def table(self, rows: Sequence[QuestionRow]) -> list[Cells]:
        """A line for each kind, question, length and choice."""
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
            }
            for tally in tallies(rows, "kind", "question")
        ]

    def draw(self, rows: Sequence[QuestionRow], folder: Path) -> None:
        """For each kind and question, quality against bytes, and heat maps if there are depths."""
        from kvlite.bench.plots import draw_depths, draw_quality

        for kind, question in dict.fromkeys((row.kind, row.question) for row in rows):
            own = [row for row in rows if (row.kind, row.question) == (kind, question)]
            title, name = f"{self.name} {kind}, question {question}", f"{kind}-{question}"
            draw_quality(folder / f"quality-{name}.png", title, tallies(own), self.curves)
            if own[0].depth is not None:
                draw_depths(folder, f"depths-{name}", title, tallies(own, "depth"))


def ask(
    model: LoadedModel,
    recipes: Sequence[Recipe],
    choices: Sequence[Choice],
    questions: Sequence[str],
) -> list[Work[QuestionRow]]:
    """Every prompt of every choice; each is read once for all that one host store serves.

    Args:
        questions: "known", "unknown" or both.
    """

    @lru_cache(maxsize=1)  # units of one prompt follow one another
    def case_of(recipe: Recipe) -> Case:
        return recipe.case(model.tokenizer)

    work: list[Work[QuestionRow]] = []
    for recipe, question, party in product(recipes, questions, parties(choices)):
        about = {**recipe.columns, "question": question}
        keys = [QuestionRow.key({**about, **choice.columns}) for choice in party]
        work.append((keys, partial(_rows, model, case_of, recipe, question, party)))
    return work


def read(
    model: LoadedModel,
    case: Case,
    question: str,
    choices: Sequence[Choice],
    cancel: Event | None = None,
) -> list[Branch]:
    """Read a prompt as one turn, so that what is kept is chosen with the question in view; or, if
    the question is "unknown", the context first and then the question in a turn of its own.

    Args:
        choices, cancel: as in `read_turns`.
    """
    turns = [case.prompt] if question == KNOWN else [case.context, case.question]
    return read_turns(model, turns, choices, reserve=case.new_tokens, cancel=cancel)


def _rows(
    model: LoadedModel,
    case_of: Callable[[Recipe], Case],
    recipe: Recipe,
    question: str,
    choices: Sequence[Choice],
) -> Iterator[QuestionRow]:
    case = case_of(recipe)
    branches = read(model, case, question, choices)
    held = [branch.columns for branch in branches]
    surprises = surprise(model, branches, case.forced, case.at_keys)
    said = answers(model, branches, case.new_tokens)
    for columns, nats, ids in zip(held, surprises, said, strict=True):
        text: str = model.tokenizer.decode(ids, skip_special_tokens=True)
        share = found(case.keys, text)
        yield QuestionRow(
            **recipe.columns,
            **columns,
            question=question,
            tokens=len(case.prompt),
            hit=share == 1,
            found=share,
            leading=leading(case.keys, text),
            rouge=rouge_1(case.words, text),
            surprise=nats,
            answer=text,
        )
