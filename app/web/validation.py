"""What is asked of the app, looked at before anything is done with it.

The page sends what its controls have, but anybody may send anything to where it does. What cannot
be meant is refused here in a sentence, once for all events.
"""

import inspect
import logging
import math
from collections.abc import Callable
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import gradio as gr
from gradio.exceptions import InvalidPathError
from gradio.processing_utils import check_all_files_in_cache

from kvlite.errors import KvliteError

from ..words import spoken

_LOG = logging.getLogger(__name__)
# What a parameter may be, in words.
_KINDS: dict[Any, str] = {str: "text", int: "a whole number", float: "a number", bool: "yes or no"}
_LARGEST = 2**63
_SHOWN = 100
_ODD = "this is not what the page sends: load it again"


class ValidatedPage(gr.Blocks):
    """A page whose handlers get what their annotations say, and nothing given as "" for a text."""

    async def preprocess_data(
        self, block_fn: Any, inputs: list[Any], *args: Any, **kwargs: Any
    ) -> list[Any]:
        """What a handler is given, by its components."""
        try:
            plain = [_plain(each) for each in inputs]
            values = await super().preprocess_data(block_fn, plain, *args, **kwargs)
        except InvalidPathError:
            raise refused("this is no file that was uploaded: upload it first") from None
        except gr.Error as error:
            raise refused(_in_short(error.message)) from None
        except Exception as error:
            # As Python writes it: there is in it what was sent.
            _LOG.warning("refused what was sent: %s: %s", type(error).__name__, _short(str(error)))
            raise refused(_ODD) from None
        kinds, _ = _given_to(block_fn.fn)
        return [
            _of_kind(value, *kinds[number]) if number < len(kinds) else value
            for number, value in enumerate(values)
        ]

    async def process_api(self, block_fn: Any, inputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        """What an event comes to."""
        event = self.fns[block_fn] if isinstance(block_fn, int) else block_fn
        for kind in _given_to(event.fn)[1] if kwargs.get("iterator") is None else ():
            _require_event(kind, kwargs.get("event_data"))
        try:
            return await super().process_api(block_fn, inputs, *args, **kwargs)
        except KvliteError as error:
            raise refused(spoken(str(error))) from None


def refused(sentence: str) -> gr.Error:
    """What someone is told, and no log."""
    return gr.Error(sentence, print_exception=False)


def _plain(value: Any) -> Any:
    """A value as it was sent, halves of characters made whole. Raises gr.Error if there is a number
    in it that nobody can mean."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, int | float) and not (math.isfinite(value) and abs(value) < _LARGEST):
        raise refused(f"{_short(value)} is too large, or no number: give a smaller one")
    return value


def _of_kind(value: Any, name: str, kinds: tuple[Any, ...]) -> Any:
    """A value for a parameter that is annotated so. Raises gr.Error if it is of another kind."""
    if value is None and str in kinds and NoneType not in kinds:
        return ""
    known = tuple(kind for kind in kinds if kind in _KINDS)
    numbers = (int,) if float in known else ()
    if not known or isinstance(value, (*kinds, *numbers)):
        return value
    wanted = " or ".join(_KINDS[kind] for kind in known)
    raise refused(f"{name} {_short(value)} is not {wanted}: give it as that")


def _require_event(kind: type[gr.EventData], event: gr.EventData | None) -> None:
    try:
        data: Any = getattr(event, "_data", None)
        check_all_files_in_cache(data)
        place = kind(None, data).index
        first = place[0] if isinstance(place, list) else place
    except Exception:
        raise refused(_ODD) from None
    if not isinstance(first, int) or isinstance(first, bool):
        raise refused(_ODD)


@lru_cache(maxsize=256)
def _given_to(
    fn: Callable[..., Any] | None,
) -> tuple[list[tuple[str, tuple[Any, ...]]], list[type[gr.EventData]]]:
    """The name and kinds of each parameter that the page gives; and the events it hears."""
    given, events = [], []
    if fn is not None:
        hints = get_type_hints(fn)
        for each in inspect.signature(fn).parameters.values():
            hint = hints.get(each.name, Any)
            if isinstance(hint, type) and issubclass(hint, gr.EventData):
                events.append(hint)
            elif hint is not gr.Request and each.kind is not inspect.Parameter.VAR_POSITIONAL:
                several = get_origin(hint) in (Union, UnionType)
                given.append((each.name, get_args(hint) if several else (hint,)))
    return given, events


def _in_short(message: str) -> str:
    """What a component says, but for the list of all that may be chosen."""
    chosen, among, _ = message.removeprefix("Value: ").partition(" is not in the list of choices")
    return f"{_cut(chosen)} is not in the list: choose one that is" if among else _cut(message)


def _short(value: Any) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
