"""Answers read as they come: reasoning, text, and calls whose arguments grow."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvlite.model.answers.form import ID, INDEX, AnswerForm, ArgumentReader, CallForm, Tool
from kvlite.model.answers.json_arguments import JSONArguments
from kvlite.model.answers.values import overlap

Kind = Literal["text", "reasoning", "name", "arguments"]
# How models write calls, too, that were hardly trained to: as the whole of an answer.
LOOSE = tuple(
    CallForm(
        f'{before}{{"name": "', f'", "{key}": ', "", f"}}{after}", JSONArguments(), several=False
    )
    for before, after in (("", ""), ("```json\n", "\n```"), ("```\n", "\n```"))
    for key in ("arguments", "parameters")
)
_SLOTS = {INDEX: str.isdecimal, ID: str.isalnum}
_NAME = re.compile(r"[^\s\"'<>{}()\[\]|,]+")


@dataclass(frozen=True)
class Part:
    """What came of an answer.

    Attributes:
        kind: "name" begins a call, whose "arguments" follow as JSON.
    """

    kind: Kind
    text: str


def text_in(parts: Iterable[Part], kind: Kind) -> str:
    """All that parts of an answer have of one kind."""
    return "".join(part.text for part in parts if part.kind == kind)


def calls_in(parts: Iterable[Part]) -> list[tuple[str, str]]:
    """The calls among the parts of an answer: the name of each, and its arguments as JSON."""
    found = list[tuple[str, str]]()
    for part in parts:
        if part.kind == "name":
            found.append((part.text, ""))
        elif part.kind == "arguments":
            found[-1] = (found[-1][0], found[-1][1] + part.text)
    return found


class AnswerReader:
    """Reads one answer. White space around reasoning, and between text and calls, is no part of
    them."""

    def __init__(
        self,
        form: AnswerForm,
        tools: Sequence[Tool] = (),
        *,
        reasoning: bool = False,
        begun: bool = False,
        several: bool = True,
    ) -> None:
        """For an answer that may call these tools, once unless `several`; `reasoning` if the prompt
        begins it, `begun` if the answer goes on with text."""
        self._form, self._tools = form, {tool.name: tool for tool in tools}
        self._calls = form.calls if tools else None
        self._several = several
        self._held, self._opening = "", ""
        self._begun, self._reads, self._trims = begun, True, False
        self._step: Callable[[], list[Part]] = self._reasoning if reasoning else self._text
        self._arguments: ArgumentReader | None = None

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._step == self._reasoning

    def push(self, text: str) -> list[Part]:
        """What is certain with more of the answer, in which control tokens are spelled out."""
        self._held += text
        made, self._reads = list[Part](), True
        while self._reads:
            self._reads = False
            made += self._step()
        return _joined(made)

    def flush(self) -> list[Part]:
        """The rest, at the end of the answer."""
        held, self._held = self._held, ""
        if self._step == self._reasoning:
            assert self._form.reasoning is not None
            ends = self._form.reasoning.end.startswith(held.strip())
            return [] if ends else _part("reasoning", held.rstrip())
        if self._step == self._values and self._arguments is not None:
            return _part("arguments", self._arguments.flush())
        if self._step == self._after:
            ended = _match(self._called.last, held)
            return _part("text", held[ended:].rstrip() if ended and ended > 0 else "")
        if self._step in (self._call, self._name):
            held = self._opening + held
        return _part("text", held if held.strip() else "")

    def settle(self) -> None:
        """Go on after an answer was cut: what `flush` showed of it is not shown again."""
        if not self.is_reasoning and self._held.strip():
            self._held = ""

    def _go(self, step: Callable[[], list[Part]], held: str) -> None:
        self._step, self._held, self._reads = step, held, True
        self._trims = self._trims or step == self._text

    def _reasoning(self) -> list[Part]:
        form = self._form.reasoning
        assert form is not None
        if not self._begun:
            self._held = self._held.lstrip()
            while self._held.startswith(form.begin):
                self._held = self._held.removeprefix(form.begin).lstrip()
            if form.begin.startswith(self._held):
                return []
        at = self._held.find(form.end)
        marks = [form.end]
        if self._calls is not None and (trigger := self._calls.trigger):
            marks.append(trigger)
            end = len(self._held) if at < 0 else at
            call = self._held.find(trigger, 0, end)
            while call >= 0:
                if (is_call := self._is_call(self._calls, self._held[call:])) is not False:
                    return self._thought_until(call, waits=is_call is None)
                call = self._held.find(trigger, call + 1, end)
        if at < 0:
            return self._certain("reasoning", marks)
        thought = self._held[:at].rstrip()
        self._go(self._text, self._held[at + len(form.end) :])
        self._begun = False
        return _part("reasoning", thought)

    def _thought_until(self, call: int, *, waits: bool) -> list[Part]:
        thought = self._held[:call].rstrip()
        if waits:
            self._held = self._held[len(thought) :]
            self._begun = self._begun or bool(thought)
        else:
            self._opening = self._held[len(thought) : call]
            self._go(self._call, self._held[call:])
            self._begun = False
        return _part("reasoning", thought)

    def _is_call(self, form: CallForm, text: str) -> bool | None:
        """Whether a text begins with a call of one of the tools; None if it is not known yet."""
        ends = [_match(form.first.strip() + name + form.middle, text) for name in self._tools]
        if any(end is not None and end >= 0 for end in ends):
            return True
        return None if None in ends else False

    def _text(self) -> list[Part]:
        if not self._begun and (beginning := self._beginning()) is not None:
            return beginning
        calls = self._calls
        marks = [each for each in self._form.left_out if each.startswith("<")]
        if calls is not None and calls.trigger:
            marks.append(calls.trigger)
        found = [(at, each) for each in marks if (at := self._held.find(each)) >= 0]
        if not found:
            return self._certain("text", marks)
        at, mark = min(found)
        text, rest = self._held[:at].rstrip(), self._held[at:]
        self._opening = self._held[len(text) : at]
        if calls is not None and mark == calls.trigger:
            self._go(self._call, rest)
        else:
            self._go(self._text, rest[len(mark) :])
        shown = self._shown(text)
        self._begun = False
        return shown

    def _beginning(self) -> list[Part] | None:
        """What text may begin with that is none; None if it begins with text."""
        held, reasoning, calls = self._held.lstrip(), self._form.reasoning, self._calls
        starts: list[tuple[str, Callable[[], list[Part]], int]] = [
            (each, self._text, len(each)) for each in self._form.left_out
        ]
        if reasoning is not None:
            starts.append((reasoning.begin, self._reasoning, len(reasoning.begin)))
        for start, step, used in starts:
            if held.startswith(start):
                self._go(step, held[used:])
                return []
        forms = list[CallForm]()
        if calls is not None:
            forms += [] if calls.trigger else [calls]
            forms += LOOSE if isinstance(calls.arguments, JSONArguments) else ()
        waits = any(start.startswith(held) for start, _, _ in starts)
        for form in forms:
            is_call = self._is_call(form, held)
            waits = waits or is_call is None
            if is_call:
                self._calls, self._opening = form, ""
                self._go(self._call, held)
                return []
        return [] if waits else None

    def _shown(self, text: str) -> list[Part]:
        text = text.lstrip() if self._trims and not self._begun else text
        self._begun = self._begun or bool(text)
        return _part("text", text)

    def _certain(self, kind: Kind, marks: Sequence[str]) -> list[Part]:
        """What is held, but for what one of the marks may begin with and white space before it."""
        held = self._held
        text = held[: len(held) - max((overlap(held, mark) for mark in marks), default=0)]
        text = text.rstrip() if marks else text
        self._held = held[len(text) :]
        if kind == "text":
            return self._shown(text)
        self._begun = self._begun or bool(text)
        return _part(kind, text)

    def _call(self) -> list[Part]:
        assert self._calls is not None
        end = _match(self._calls.first.strip(), self._held)
        if end is not None and end >= 0:
            self._opening += self._held[:end]
            self._go(self._name, self._held[end:])
        elif end is not None:  # it only looked like a call
            first = self._opening + self._held[0]
            self._go(self._text, self._held[1:])
            self._begun = True
            return _part("text", first)
        return []

    def _name(self) -> list[Part]:
        calls, held = self._called, self._held.lstrip()
        waits = not held or any(name.startswith(held) for name in self._tools)
        following = calls.middle + calls.arguments.opening
        for name in () if waits else self._names(held, following.strip()[:1]):
            rest = held[len(name) :]
            end = _match(following, rest) if rest else None
            waits = waits or end is None
            if end is not None and end >= 0:
                after = [calls.last, calls.between] if calls.several else [calls.last]
                parameters = self._tools[name].parameters if name in self._tools else {}
                self._arguments = calls.arguments.reader(parameters, after)
                self._go(self._values, rest[end - len(calls.arguments.opening) :])
                return [Part("name", name)]
        return [] if waits else self._lost(self._opening)

    def _names(self, held: str, following: str) -> list[str]:
        """Names that a text may begin with, the longest tool's first; and any other, up to what
        follows it."""
        known = sorted(filter(held.startswith, self._tools), key=len, reverse=True)
        other = held.partition(following)[0].rstrip() if following else held
        found = _NAME.match(other)
        return [*(known if following else ()), *([found[0]] if found else ())]

    def _values(self) -> list[Part]:
        assert self._arguments is not None
        text, self._held = self._held, ""
        made, rest = self._arguments.push(text)
        if rest is not None:
            self._go(self._after, rest)
        return _part("arguments", made)

    def _after(self) -> list[Part]:
        calls = self._called
        again = _match(calls.between, self._held) if calls.several and self._several else -1
        ended = _match(calls.last, self._held)
        if again is not None and again >= 0:
            self._opening = self._held[max(ended or 0, 0) : again]
            self._go(self._name, self._held[again:])
        elif again is None and (not calls.last or self._held.strip() != calls.last.strip()):
            return []
        elif ended is not None:
            self._calls = self._form.calls if self._several else None
            if ended < 0:
                return self._lost()
            self._go(self._text, self._held[ended:])
        return []

    def _lost(self, opening: str = "") -> list[Part]:
        self._go(self._text, self._held)
        self._begun = True
        return _part("text", opening)

    @property
    def _called(self) -> CallForm:
        assert self._calls is not None
        return self._calls


def _match(piece: str, text: str) -> int | None:
    """Where a piece of a form ends that a text begins with, -1 if it does not; None if it is not
    known yet. White space may be more or less."""
    at = 0
    for character in piece:
        if character.isspace():
            continue
        is_slot = _SLOTS.get(character, character.__eq__)
        while at < len(text) and text[at].isspace():
            at += 1
        if at == len(text):
            return None
        if not is_slot(text[at]):
            return -1
        at += 1
        while character in _SLOTS and at < len(text) and is_slot(text[at]):
            at += 1
    return at


def _part(kind: Kind, text: str) -> list[Part]:
    return [Part(kind, text)] if text else []


def _joined(parts: Sequence[Part]) -> list[Part]:
    made = list[Part]()
    for each in parts:
        if made and made[-1].kind == each.kind != "name":
            made[-1] = Part(each.kind, made[-1].text + each.text)
        else:
            made.append(each)
    return made
