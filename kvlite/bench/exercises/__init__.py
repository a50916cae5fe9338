"""Exercises of `kvlite bench quality`: one file each, made from a seed and checked by exact
rules."""

from collections.abc import Callable

from kvlite.bench.exercises import arithmetic, code, copy_many, edits, tools, twenty_turns
from kvlite.bench.exercises.exercise import Exercise, Material

EXERCISES: dict[str, Callable[[Material], Exercise]] = {
    "copy-many": copy_many.make,
    "edits": edits.make,
    "tools": tools.make,
    "arithmetic": arithmetic.make,
    "twenty-turns": twenty_turns.make,
    "code": code.make,
}
