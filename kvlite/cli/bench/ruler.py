"""`kvlite bench ruler`: several needles, chains, counts."""

from typing import TYPE_CHECKING, Annotated

import typer

from kvlite.cli.bench.options import (
    METHODS,
    Budgets,
    Device,
    Dtype,
    Json,
    Methods,
    Model,
    Out,
    Question,
    Repeats,
    Tokens,
    once,
)
from kvlite.cli.bench.run import Done, Measured, Measurement, run
from kvlite.settings import EMBEDDED_MODEL, Settings

if TYPE_CHECKING:
    from kvlite.runner import Runner

TASKS = ["single", "multi-key", "multi-value", "multi-query", "variables", "words"]
Tasks = Annotated[
    list[str],
    typer.Option("--task", callback=once, help=f"{', '.join(TASKS)}; may be repeated"),
]


def ruler(
    tokens: Tokens = [2000],
    method: Methods = METHODS,
    budget: Budgets = [512],
    task: Tasks = TASKS,
    question: Question = "known",
    repeats: Repeats = 5,
    model: Model = EMBEDDED_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Ask for one of several needles, for all of them, for a chain of variables, for the words
    that stand most often: tasks after RULER.

    Found is the share of the wanted names or numbers that are in the answer. Small models fail
    some tasks with their whole cache: compare with `full`.

    Examples:

      kvlite bench ruler --tokens 4000 --budget 512 --repeats 10

      kvlite bench ruler --task multi-query --task variables --question both --out run2
    """
    settings = Settings(model=model, device=device, dtype=dtype)
    from kvlite.bench.grid import choices, require_known
    from kvlite.bench.pictures import draw_questions
    from kvlite.bench.prose import bundled_prose
    from kvlite.bench.questions import ASKED, QuestionRow, measured, tallies
    from kvlite.bench.ruler import KINDS, ruler_cases

    require_known("--task", task, KINDS)
    require_known("--question", [question], ASKED)
    grid = choices(method, budget, max(tokens))

    def measure(runner: "Runner", done: Done) -> Measured:
        prose = bundled_prose()
        recipes = ruler_cases(runner.tokenizer, prose, lengths=tokens, kinds=task, repeats=repeats)
        return measured(runner, prose, recipes, grid, ASKED[question], done)

    options = {
        "tokens": tokens,
        "methods": method,
        "budgets": budget,
        "tasks": task,
        "question": question,
        "seeds": list(range(repeats)),
    }
    tasks = Measurement("ruler", "Tasks after RULER", QuestionRow, measure, tallies, draw_questions)
    run(tasks, settings, options, out, as_json)
