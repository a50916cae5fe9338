"""Refusing a text that is too long for a model before all of it is tokenized.

No token stands for more characters than the longest entry of the vocabulary, so a text of more than
`max_context` times as many cannot fit. A shorter one is counted in pieces, until there are too many
tokens or the text ends.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from kvlite.config.checked_file import Damaged, from_json, sound
from kvlite.errors import ContextError, require_uncancelled
from kvlite.model.in_thread import in_thread

T = TypeVar("T")

# Characters that are tokenized at a time, some 20 ms; within the last ones a piece ends at a space.
_PIECE, _ENDING = 32_768, 256
# The most tokens by which two pieces, tokenized separately, can exceed both together.
_SLACK = 16
# Unicode's composition (NFC) merges at most four characters into one.
_COMPOSED = 4
# Seconds between two checks of `cancel`.
_BEAT = 0.05


def text_limit(tokenizer: Any, max_context: int) -> int:
    """The most characters that can possibly fit a model trained for `max_context` tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizes = getattr(backend, "normalizer", None) is not None
    return _limit(_longest(tokenizer), max_context, normalizes)


@lru_cache(maxsize=4)
def _longest(tokenizer: Any) -> int:
    return max(map(len, tokenizer.get_vocab()), default=1)


def text_limit_of(folder: Path) -> int | None:
    """Like `text_limit`, from the files in a model's folder; None if they do not tell."""
    try:
        config = from_json((folder / "config.json").read_bytes())
        own = from_json((folder / "tokenizer.json").read_bytes())
        with sound():
            vocab = own["model"]["vocab"]
            words = vocab if isinstance(vocab, dict) else [word for word, _ in vocab]
            added = [each["content"] for each in own["added_tokens"]]
            scale = config.get("rope_parameters") or config.get("rope_scaling") or {}
            stretch = max(1.0, float(scale.get("factor") or 1))
            most = int(int(config["max_position_embeddings"]) * stretch)
            longest = max(map(len, [*words, *added]), default=1)
            return _limit(longest, most, own.get("normalizer") is not None)
    except (OSError, Damaged):
        return None


def _limit(longest: int, max_context: int, normalizes: bool) -> int:
    return longest * max_context * (_COMPOSED if normalizes else 1)


def require_fits(
    tokenizer: Any,
    text: str,
    max_context: int,
    cancel: threading.Event | None = None,
    called: str = "",
) -> None:
    """Refuse a text that is longer than a model was trained for, without tokenizing all of it;
    `called` are the names of its documents. Raises ContextError if it is longer, by more than what
    surrounds it in a chat template; Stopped if `cancel` was set."""
    if len(text) <= max_context:  # counted in no time, with all that surrounds it
        return
    if len(text) > text_limit(tokenizer, max_context):
        raise too_long(len(text) // 4, max_context, called)
    counted = done = 0
    for number, piece in enumerate(_pieces(text)):
        require_uncancelled(cancel)
        counted += len(tokenizer.encode(piece, add_special_tokens=False))
        done += len(piece)
        if counted - _SLACK * number > max_context:
            raise too_long(counted * len(text) // done, max_context, called)


def too_long(tokens: int, max_context: int, called: str = "") -> ContextError:
    """The error for a text of about so many tokens, and the names of its documents."""
    of = f" of {called}" if called else ""
    return ContextError(
        f"about {tokens:,} tokens{of} do not fit this model, which was trained for "
        f"{max_context:,}: ask about a part of the document, split it, or use a model with a "
        "longer context (--model)",
        tokens,
    )


def tokenized(
    encode: Callable[[], list[int]],
    tokenizer: Any,
    text: str,
    max_context: int,
    cancel: threading.Event | None = None,
    called: str = "",
) -> list[int]:
    """What `encode` returns, unless `text` cannot fit; whoever cancels need not wait for it. Args
    and errors are those of `require_fits`."""
    require_fits(tokenizer, text, max_context, cancel, called)
    return encode() if len(text) <= _PIECE else _stoppable(encode, cancel)


def _stoppable(work: Callable[[], T], cancel: threading.Event | None) -> T:
    # A tokenizer cannot be interrupted.
    made = in_thread(work, "kvlite tokenizing")
    while not made.done():
        require_uncancelled(cancel)
        wait([made], timeout=_BEAT)
    return made.result()


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = min(len(text), start + _PIECE)
        if end < len(text):
            space = text.rfind(" ", max(start + 1, end - _ENDING), end)
            end = space if space > 0 else end
        yield text[start:end]
        start = end
