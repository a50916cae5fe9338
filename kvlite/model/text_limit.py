"""How long a text a model can hold, told before the text is tokenized, or from its size alone.

No token stands for more characters than the longest entry of its vocabulary, so a text of more than
`max_context` times as many cannot fit. A shorter one is counted in pieces, until there are too many
tokens or none are left.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

from kvlite.errors import ContextError, require_uncancelled

T = TypeVar("T")

# Characters that are tokenized at a time, some 20 ms; and those in which a piece may end.
_PIECE, _ENDING = 32_768, 256
# Tokens by which two pieces, tokenized by themselves, can be more than both together.
_SLACK = 16
# Unicode's composition (NFC) makes one character of four at most.
_COMPOSED = 4
# Seconds between two looks at whether someone cancelled.
_BEAT = 0.05


def text_limit(tokenizer: Any, max_context: int) -> int:
    """The most characters that can possibly fit a model.

    Args:
        tokenizer: the model's.
        max_context: tokens that the model was trained for.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizes = getattr(backend, "normalizer", None) is not None
    return _limit(tokenizer.get_vocab(), max_context, normalizes)


def text_limit_of(folder: Path) -> int | None:
    """As `text_limit`, of the model in a folder, whose files alone are read; None where they do not
    tell."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        own = json.loads((folder / "tokenizer.json").read_bytes())
        vocab = own["model"]["vocab"]
        words = vocab if isinstance(vocab, dict) else [word for word, _ in vocab]
        added = [each["content"] for each in own["added_tokens"]]
        scale = config.get("rope_parameters") or config.get("rope_scaling") or {}
        stretch = max(1.0, float(scale.get("factor") or 1))
        most = int(int(config["max_position_embeddings"]) * stretch)
        return _limit([*words, *added], most, own.get("normalizer") is not None)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None


def _limit(words: Iterable[str], max_context: int, normalizes: bool) -> int:
    return max(map(len, words), default=1) * max_context * (_COMPOSED if normalizes else 1)


def require_fits(
    tokenizer: Any, text: str, max_context: int, cancel: threading.Event | None = None
) -> None:
    """Refuse a text that is longer than a model was trained for, without tokenizing all of it.

    Raises:
        ContextError: it is longer, by more than what surrounds it in a chat template.
        Stopped: `cancel` was set.
    """
    if len(text) <= max_context:  # which is counted in no time, with all that stands around it
        return
    if len(text) > text_limit(tokenizer, max_context):
        raise too_long(len(text) // 4, max_context)
    counted = done = 0
    for number, piece in enumerate(_pieces(text)):
        require_uncancelled(cancel)
        counted += len(tokenizer.encode(piece, add_special_tokens=False))
        done += len(piece)
        if counted - _SLACK * number > max_context:
            raise too_long(counted * len(text) // done, max_context)


def too_long(tokens: int, max_context: int) -> ContextError:
    """What is said of a text of about so many tokens."""
    return ContextError(
        f"about {tokens:,} tokens do not fit this model, which was trained for {max_context:,}: "
        "ask about a part of the document, split it, or use a model with a longer context "
        "(--model)"
    )


def tokenized(
    encode: Callable[[], list[int]],
    tokenizer: Any,
    text: str,
    max_context: int,
    cancel: threading.Event | None = None,
) -> list[int]:
    """The tokens that `encode` makes of a text, unless it cannot fit; whoever cancels does not wait
    for it. Errors are those of `require_fits`."""
    require_fits(tokenizer, text, max_context, cancel)
    return encode() if len(text) <= _PIECE else _stoppable(encode, cancel)


def _stoppable(work: Callable[[], T], cancel: threading.Event | None) -> T:
    """What `work` returns, which is done in another thread, as a tokenizer cannot be interrupted.

    Raises:
        Stopped: `cancel` was set.
    """
    made: Future[T] = Future()

    def do() -> None:
        try:
            made.set_result(work())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=do, name="kvlite tokenizing", daemon=True).start()
    while not made.done():
        require_uncancelled(cancel)
        wait([made], timeout=_BEAT)
    return made.result()


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces that end where a word does, as far as it has words."""
    start = 0
    while start < len(text):
        end = min(len(text), start + _PIECE)
        if end < len(text):
            space = text.rfind(" ", max(start + 1, end - _ENDING), end)
            end = space if space > 0 else end
        yield text[start:end]
        start = end
