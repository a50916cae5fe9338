"""What a question task asks: a case, the same for every method.

A prompt is one user message, the question after the context. Cut where the question begins, it
is read at once (the question is known while the cache is cut) or in two turns (it is not): the
tokens are the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvlite.documents import whole_characters
from kvlite.errors import SettingError
from kvlite.model.chat_template import said_tokens

LEAST_ANSWER, SPARE_TOKENS, MOST_ANSWER = 40, 16, 128


@dataclass(frozen=True)
class Puzzle:
    """A case as text.

    Attributes:
        keys: what the answer must contain.
        words: a right answer, in the words of the context; the keys are in it in this order.
    """

    context: str
    question: str
    keys: tuple[str, ...]
    words: str


@dataclass(frozen=True)
class Case:
    """One prompt, and what is known of its answer.

    Attributes:
        context, question: token ids of the prompt up to where the question begins, and from there.
        keys, words: as in `Puzzle`.
        forced: token ids of `words`, up to the end of the last key.
        at_keys: indices into `forced` of the tokens that are part of a key.
        new_tokens: the longest answer.
    """

    context: tuple[int, ...]
    question: tuple[int, ...]
    keys: tuple[str, ...]
    words: str
    forced: tuple[int, ...]
    at_keys: tuple[int, ...]
    new_tokens: int

    @property
    def prompt(self) -> list[int]:
        """All of it, as read when the question is known."""
        return [*self.context, *self.question]


Made = tuple[Callable[[int], Puzzle], int]
"""Makes a puzzle of n units of text, and the largest n."""


@dataclass(frozen=True)
class Recipe:
    """A case before it is made.

    Attributes:
        task, kind: which generator makes it.
        length: tokens asked for; the prompt has at most as many.
        depth: where in the context the needle is, 0 to 1; None if there is no such place.
        seed: which of several of its kind.
        case: makes it, given the model's tokenizer.
    """

    task: str
    kind: str
    length: int
    depth: float | None
    seed: int
    case: Callable[[Any], Case]

    @property
    def columns(self) -> dict[str, Any]:
        """Which case it is, as rows name it."""
        return {name: getattr(self, name) for name in ("task", "kind", "length", "depth", "seed")}


def fitted(prepare: Callable[[], Made], length: int, about: str, tokenizer: Any) -> Case:
    """A case of the longest puzzle that fits.

    Args:
        prepare: how its text is made.
        length: of the prompt, in tokens.
        about: what it is, for errors.

    Raises:
        SettingError: not even a puzzle of no units fits.
    """
    puzzle = longest(tokenizer, prepare(), length, about)
    ids = _prompt(tokenizer, puzzle)
    begins = begun_alike(ids, first_message(tokenizer, f"{puzzle.context}\n\n"))
    forced, at_keys = forced_answer(tokenizer, puzzle.words, puzzle.keys)
    return Case(
        context=tuple(ids[:begins]),
        question=tuple(ids[begins:]),
        keys=puzzle.keys,
        words=puzzle.words,
        forced=tuple(forced),
        at_keys=tuple(at_keys),
        new_tokens=answer_tokens(len(forced)),
    )


def longest(tokenizer: Any, made: Made, length: int, about: str) -> Puzzle:
    """The longest puzzle whose prompt has at most `length` tokens.

    Raises:
        SettingError: not even a puzzle of no units fits.
    """
    build, high = made
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        fits = len(_prompt(tokenizer, build(middle))) <= length
        low, high = (middle, high) if fits else (low, middle - 1)
    puzzle = build(low)
    if (least := len(_prompt(tokenizer, puzzle))) > length:
        raise SettingError(f"--tokens {length} is too short for {about}: give at least {least}")
    return puzzle


def answer_tokens(right: int) -> int:
    """The longest answer, if a right one has `right` tokens."""
    return max(LEAST_ANSWER, right + SPARE_TOKENS)


def asked(tokenizer: Any, question: str) -> str:
    """A question as a message; a model without a chat template needs to see where to answer."""
    return question if tokenizer.chat_template else f"{question}\nAnswer:"


def require_fit(recipes: Sequence[Recipe], tokenizer: Any) -> None:
    """Raises SettingError if a length is too short for a kind: makes one case of each kind, of the
    shortest length."""
    for kind in dict.fromkeys(recipe.kind for recipe in recipes):
        shortest = min((each for each in recipes if each.kind == kind), key=lambda r: r.length)
        shortest.case(tokenizer)


def _prompt(tokenizer: Any, puzzle: Puzzle) -> list[int]:
    return first_message(tokenizer, f"{puzzle.context}\n\n{asked(tokenizer, puzzle.question)}")


def first_message(tokenizer: Any, text: str) -> list[int]:
    """Token ids as a conversation reads its first message."""
    whole = whole_characters(text)
    if tokenizer.chat_template is None:
        ids: list[int] = tokenizer.encode(whole)
        return ids
    return said_tokens(tokenizer, whole, opening=True, first=True)


def begun_alike(ids: list[int], others: list[int]) -> int:
    """How many tokens two prompts begin with alike: those of the context, since one of them has
    no question."""
    pairs = zip(ids, others, strict=False)
    least = min(len(ids), len(others))
    return next((index for index, (one, other) in enumerate(pairs) if one != other), least)


def forced_answer(tokenizer: Any, words: str, keys: Sequence[str]) -> tuple[list[int], list[int]]:
    """The right answer's tokens to the end of its last key, and which of them belong to keys."""
    encoded = tokenizer(words, add_special_tokens=False, return_offsets_mapping=True)
    spans, end = [], 0
    for key in keys:
        begin = words.index(key, end)
        end = begin + len(key)
        spans.append((begin, end))
    offsets = encoded["offset_mapping"]
    at_keys = [
        index
        for index, (low, high) in enumerate(offsets)
        if any(low < stop and high > start for start, stop in spans)
    ]
    return encoded["input_ids"][: at_keys[-1] + 1], at_keys
