"""Tokens to text as they come, never splitting a character, never showing a stop string."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvlite.model.answers.values import overlap

_UNFINISHED = "\ufffd"


class TextStream:
    """Turns tokens into pieces of text; what may still change is held back.

    Attributes:
        stopped: whether a stop string came; text from there on is dropped.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: tuple[str, ...] = (),
        spelled: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """`spelled` are special tokens that are a part of the text."""
        self.tokenizer, self.spelled = tokenizer, spelled
        self.stops = tuple(stop for stop in stops if stop)
        self.stopped = False
        self.ids: list[int] = []
        self.shown = 0
        self.decoded = 0
        self.held = ""

    def push(self, token_id: int) -> str:
        """The text that is now certain; often empty in the middle of a character."""
        self.ids.append(token_id)
        before = self._decode(self.ids[self.shown : self.decoded])
        after = self._decode(self.ids[self.shown :])
        if after.endswith(_UNFINISHED) or len(after) <= len(before):
            return ""
        self.shown, self.decoded = self.decoded, len(self.ids)
        return self._release(after[len(before) :])

    def flush(self) -> str:
        """The rest, at the end of an answer, half characters included."""
        if self.stopped:
            return ""
        before = self._decode(self.ids[self.shown : self.decoded])
        rest = self._release(self._decode(self.ids[self.shown :])[len(before) :])
        self.shown = self.decoded = len(self.ids)
        held, self.held = ("", "") if self.stopped else (self.held, "")
        return rest + held

    def _decode(self, ids: list[int]) -> str:
        at = next((at for at, token in enumerate(ids) if token in self.spelled), None)
        if at is not None:
            before, after = self._decode(ids[:at]), self._decode(ids[at + 1 :])
            return f"{before}{self.spelled[ids[at]]}{after}"
        text: str = self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _release(self, text: str) -> str:
        self.held += text
        met = [at for at in (self.held.find(stop) for stop in self.stops) if at >= 0]
        if met:
            self.stopped = True
            text, self.held = self.held[: min(met)], ""
            return text
        keep = max((overlap(self.held, stop) for stop in self.stops), default=0)
        text, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return text


class AnswerText:
    """An answer's text; and the same with some special tokens spelled out."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...], spelled: Mapping[int, str]) -> None:
        self._text = TextStream(tokenizer, stops)
        self._raw = TextStream(tokenizer, stops, spelled) if spelled else None

    @property
    def stopped(self) -> bool:
        """Whether a stop string came; it may have a token that is spelled out."""
        return self._text.stopped or (self._raw is not None and self._raw.stopped)

    def push(self, token_id: int) -> tuple[str, str]:
        """What is certain with one more token, of both."""
        text = self._text.push(token_id)
        return text, text if self._raw is None else self._raw.push(token_id)

    def flush(self) -> tuple[str, str]:
        """The rest of both, at the end of an answer."""
        text = self._text.flush()
        return text, text if self._raw is None else self._raw.flush()
