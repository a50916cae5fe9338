"""`kvlite bench quality`: exercises are what they say, and their rules are exact."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvlite import Runner
from kvlite.bench.exercises import EXERCISES
from kvlite.bench.exercises.exercise import Exercise
from kvlite.bench.options import EXERCISES as NAMES
from kvlite.bench.quality import Quality, QualityRow, exercise
from kvlite.errors import SettingError

TOKENS = 3000

# What is nearly right, made from a right answer, and what it scores.
NEARLY: dict[str, list[tuple[Callable[[str], str], float]]] = {
    "copy-many": [
        (lambda right: json.dumps({**json.loads(right), "draught": "deep"}), 29 / 30),
        (lambda right: right[:-1], 0),
        (lambda right: "[]", 0),
    ],
    "edits": [
        (lambda right: right.replace('"old_str": "    ', '"old_str": "'), 0),
        (lambda right: right.replace("    ", ""), 1),
        (lambda right: json.dumps({**json.loads(right), "old_str": "def "}), 0),
        (lambda right: json.dumps({**json.loads(right), "new_str": ""}), 0),
        (lambda right: "[]", 0),
    ],
    "tools": [
        (lambda right: right.replace('"order_id"', '"order"'), 2 / 3),
        (lambda right: right.replace("_order", "_x"), 0),
        (lambda right: right.removesuffix("]"), 0),
    ],
    "arithmetic": [
        (lambda right: f"First 1,000, then 12, so {right}.", 1),
        (lambda right: f"{right} Or 7.", 0),
    ],
    "twenty-turns": [
        (lambda right: re.sub(r"(\d)(\d{3})(\d{3})", r"\1,\2,\3", right), 1),
        (lambda right: right[:-2], 0),
        (lambda right: f"{right}1", 0),
        (lambda right: f"{right} or 1234567", 0),
    ],
    "code": [
        (lambda right: f"```python\n{right}\n```", 1),
        (lambda right: right.replace("(", "(0, "), 0),
        (lambda right: right.replace("=1", "=value").replace("result", "x"), 1),
        (lambda right: right.replace("=1, ", "=1, more=1, ", 1), 1 / 4),
        (lambda right: f"{right.rpartition(',')[0]})", 2 / 3),
        (lambda right: right.removesuffix(")"), 0),
    ],
}


def made(smollm: Runner, task: str, seed: int = 0, tokens: int = TOKENS) -> Exercise:
    return exercise(smollm.model, task, tokens, seed)


def test_options_name_all_exercises() -> None:
    assert (*EXERCISES,) == NAMES and [*NEARLY] == [*EXERCISES]


@pytest.mark.parametrize("task", EXERCISES)
def test_answers_are_judged_by_exact_rules(smollm: Runner, task: str) -> None:
    for seed in range(2):
        for turn in made(smollm, task, seed).turns:
            assert turn.check(turn.right) == 1 and turn.check("") == turn.check("no") == 0
            for change, score in NEARLY[task]:
                changed = change(turn.right)
                assert changed != turn.right
                assert turn.check(changed) == pytest.approx(score)


@pytest.mark.parametrize("task", EXERCISES)
def test_an_exercise_is_its_seeds_and_of_the_length_that_was_asked_for(
    smollm: Runner, task: str
) -> None:
    def texts(exercise: Exercise) -> str:
        said = [turn.message for turn in exercise.turns]
        return json.dumps([*exercise.before, *(each.plain() for each in exercise.tools), *said])

    one, same, other = (texts(made(smollm, task, seed)) for seed in (1, 1, 2))
    assert one == same != other
    for tokens in (TOKENS, 6000):
        exercise = made(smollm, task, 1, tokens)
        said = [turn.message for turn in exercise.turns]
        said += [json.dumps(each.plain()) for each in exercise.tools]
        said += [str(each["content"]) for each in exercise.before]
        count = sum(len(smollm.tokenizer.encode(each)) for each in said)
        assert 0.75 * tokens < count < 1.1 * tokens


def test_what_cannot_be_done_is_said(smollm: Runner) -> None:
    with pytest.raises(SettingError, match="too short"):
        made(smollm, "tools", tokens=1500)
    with pytest.raises(SettingError, match="--task 'letters'"):
        Quality(tasks=["letters"])
    with pytest.raises(SettingError, match="knows no tools: give --task code"):
        Quality(tasks=["tools", "code"]).work(smollm)
    with pytest.raises(SettingError, match="--kv-bits '5'"):
        Quality(kv_bits=["5"])
    with pytest.raises(SettingError, match="'magic'"):
        Quality(method="magic")


def test_left_out_tasks_are_all_that_the_model_can_do(smollm: Runner) -> None:
    work = Quality(cases=1).work(smollm)
    assert {keys[0][0] for keys, _ in work} == {*EXERCISES} - {"tools"}


def rows_of(scores: dict[str, list[float]]) -> list[QualityRow]:
    """Rows of some budgets, one for each seed's score."""
    return [
        QualityRow(
            task="code",
            length=3000,
            seed=seed,
            method="spans",
            budget=budget,
            kv_bits="16",
            recall="off",
            seen=3000,
            kept=300.0,
            kv_bytes=1000,
            host_kv_bytes=0,
            scores=[score],
            answers=[""],
        )
        for budget, found in scores.items()
        for seed, score in enumerate(found)
    ]


def test_the_verdict_is_that_of_the_differences() -> None:
    """Exercise by exercise: what varies among exercises does not count."""
    full = [0.1, 0.5, 0.9, 0.3]
    rows = rows_of(
        {
            "100%": full,
            "25%": [each - 0.1 for each in full],
            "50%": [0.2, 0.4, 1.0, 0.2],
            "75%": [each + 0.05 for each in full],
        }
    )
    task = Quality(budgets=["25%", "50%", "75%"])
    verdicts = {line["budget"]: line["verdict"] for line in task.table(rows)}
    assert verdicts == {
        "100%": "full",
        "25%": "worse than full",
        "50%": "as full",
        "75%": "better than full",
    }
    (worse,) = task.summary(rows)["worse"]
    assert worse["budget"] == "25%"


@pytest.mark.long
def test_a_run_compares_ways_with_the_full_cache(smollm: Runner, tmp_path: Path) -> None:
    task = Quality(tasks=["code"], tokens=[1500], cases=1, budgets=["6%"], recall=["off"])
    rows = [row for _, run in task.work(smollm) for row in run()]
    full, cut = rows
    assert full.way.is_full and full.kept == full.seen and full.exercise == cut.exercise
    assert cut.kept < 0.08 * cut.seen and cut.kv_bytes < 0.3 * full.kv_bytes
    assert [line["verdict"] for line in task.table(rows)] == ["full", "?"]
    assert all(len(row.answers) == len(row.scores) == 4 for row in rows)
