"""What the commands that ask questions have in common: recipes of prompts, a grid, a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlite.cli.bench.options import recall_options
from kvlite.cli.bench.run import Done, Measured, Measurement, run
from kvlite.config.settings import Settings

if TYPE_CHECKING:
    from kvlite.bench.case import Recipe
    from kvlite.conversation.runner import Runner


@dataclass(frozen=True)
class Asked:
    """What is asked of what, as the user said it.

    Attributes:
        own: options of this command alone, by name.
    """

    tokens: Sequence[int]
    methods: Sequence[str]
    budgets: Sequence[int]
    kv_bits: Sequence[str]
    recall: list[str]
    recall_bits: list[str]
    question: str
    repeats: int
    own: Mapping[str, Any]


def run_asking(
    command: str,
    title: str,
    asked: Asked,
    recipes: "Callable[[Any, str], Sequence[Recipe]]",
    settings: Settings,
    out: Path | None,
    as_json: bool,
) -> None:
    """Ask every prompt of every method, budget, width and recall.

    Args:
        recipes: of the prompts, given the tokenizer and the prose they are made of.

    Raises:
        SettingError: a method, a budget, a width, a recall or `question` is none, or prompts do
            not fit.
    """
    from kvlite.bench.grid import choices, recalled, require_known
    from kvlite.bench.pictures import draw_questions
    from kvlite.bench.prose import bundled_prose
    from kvlite.bench.questions import ASKED, QuestionRow, measured, tallies

    require_known("--question", [asked.question], ASKED)
    ways = recalled(asked.recall, asked.recall_bits)
    grid = choices(asked.methods, asked.budgets, max(asked.tokens), asked.kv_bits, ways)

    def measure(runner: "Runner", done: Done) -> Measured:
        prose = bundled_prose()
        made = recipes(runner.tokenizer, prose)
        return measured(runner, prose, made, grid, ASKED[asked.question], done)

    options = {
        "tokens": asked.tokens,
        "methods": asked.methods,
        "budgets": asked.budgets,
        "kv bits": asked.kv_bits,
        **recall_options(asked.recall, asked.recall_bits),
        **asked.own,
        "question": asked.question,
        "seeds": list(range(asked.repeats)),
    }
    measurement = Measurement(command, title, QuestionRow, measure, tallies, draw_questions)
    run(measurement, settings, options, out, as_json)
