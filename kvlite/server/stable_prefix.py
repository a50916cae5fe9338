"""What changes early in a prompt though nothing was said: billing headers, and which day or time it
is. All that follows has to be read again.

Headers tell a model nothing, and are left out. Dates and times are told as a kept conversation has
them, for a day at most, if the request or the server allows that.
"""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import takewhile

from kvlite.conversation.record import ToldTimes
from kvlite.server.config import ServerConfig
from kvlite.server.dates import places_of_now
from kvlite.server.fields import Sampled
from kvlite.server.messages import Plain
from kvlite.server.refusals import Refusal

# Seconds for which a model may be told an earlier date or time.
_LONGEST = 24 * 3600.0
# The first line of Claude Code's system text, which is another one in each request.
_HEADER = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
# What programs put into the user's first message; what the user says there stays as it is.
_TAG = re.compile("<(/?)(system-reminder|environment_context|environment_details|env)>")


@dataclass(frozen=True)
class Stable:
    """Messages as a model is told them.

    Attributes:
        times: what they say of now.
        kept: dates and times that are told, and those that the request has in their place.
    """

    messages: Sequence[Plain]
    times: Sequence[ToldTimes] = ()
    kept: Sequence[tuple[str, str]] = ()

    @property
    def notes(self) -> list[str]:
        """What is said of that with the answer."""
        pairs = ", ".join(f"{told!r} in place of {given!r}" for told, given in self.kept)
        return [f"stable_prefix: the model was told {pairs}"] if pairs else []


def is_allowed(request: Sampled, config: ServerConfig) -> bool:
    """Whether a model may be told earlier dates and times. Raises Refusal if the request does not
    say that by true or false."""
    given = (request.kvlite or {}).get("stable_prefix")
    if given is not None and not isinstance(given, bool):
        raise Refusal("kvlite.stable_prefix is not true or false", param="kvlite")
    return config.stable_prefix if given is None else given


def stable(messages: Sequence[Plain], known: Iterable[ToldTimes]) -> Stable:
    """Messages without headers, and with dates and times as those that are `known`; the first that
    fits is taken."""
    now, earlier = time.time(), dict[str, ToldTimes]()
    for each in known:
        if now - each.since < _LONGEST:
            earlier.setdefault(each.text, each)
    told, times, kept = list[Plain](), list[ToldTimes](), list[tuple[str, str]]()
    first = [*takewhile(lambda each: each["role"] != "assistant", messages)]
    for message in first:
        is_system, text = message["role"] == "system", message["content"]
        text = _HEADER.sub("", text) if is_system else text
        parts = [(0, len(text))] if is_system else [*_by_programs(text)]
        for begin, end in reversed(parts):  # so that the places of those before stay
            part = _Part(text[begin:end])
            if not part.values:
                continue
            own = ToldTimes(part.key, part.values, now)
            before = earlier.get(own.text, own)
            if before.values != own.values:
                pairs = zip(before.values, own.values, strict=True)
                kept += [(one, other) for one, other in pairs if one != other]
                text, own = text[:begin] + part.told(before.values) + text[end:], before
            times.append(own)
        if text or text == message["content"]:
            told.append({**message, "content": text})
    return Stable([*told, *messages[len(first) :]], times, kept)


def _by_programs(text: str) -> Iterator[tuple[int, int]]:
    """Where a text has what programs put into it."""
    begun: re.Match[str] | None = None
    for tag in _TAG.finditer(text):
        if begun is None and not tag[1]:
            begun = tag
        elif begun is not None and tag[1] and tag[2] == begun[2]:
            yield begun.end(), tag.start()
            begun = None


class _Part:
    """A text, with the dates and times in it that say what is now.

    Attributes:
        values: of these.
        key: a hash of all else.
    """

    def __init__(self, text: str) -> None:
        places = places_of_now(text)
        self.values = tuple(text[begin:end] for begin, end in places)
        edges = [0, *(edge for place in places for edge in place), len(text)]
        self._rest = [text[begin:end] for begin, end in zip(edges[::2], edges[1::2], strict=True)]
        self.key = sha256("\0".join(self._rest).encode(errors="surrogatepass")).hexdigest()[:16]

    def told(self, values: Sequence[str]) -> str:
        """The text with other ones."""
        return "".join(
            f"{rest}{value}" for rest, value in zip(self._rest, [*values, ""], strict=True)
        )
