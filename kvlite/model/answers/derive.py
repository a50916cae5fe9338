"""The form of answers, read off what a chat template makes of an answer that is known.

A call of a tool with a name that no template contains is rendered, and parted at that name and at
its arguments. A form holds if it predicts what the template makes of other calls.
"""

import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from kvlite.config.checked_file import from_json
from kvlite.errors import ChatTemplateError
from kvlite.model.answers.form import (
    ID,
    INDEX,
    AnswerForm,
    CallForm,
    ReasoningForm,
    Tool,
)
from kvlite.model.answers.json_arguments import JSONArguments
from kvlite.model.answers.known import known
from kvlite.model.answers.parameter_arguments import ParameterArguments
from kvlite.model.answers.reader import AnswerReader, calls_in, text_in
from kvlite.model.control_tokens import Controls
from kvlite.model.jinja_template import render, source_of
from kvlite.model.template_messages import normalized, normalized_tools, text_arguments

_LOG = logging.getLogger("kvlite.tools")
# Words that no template contains.
_ONE, _TWO, _KEY, _OTHER_KEY = "kvliteToolOne", "kvliteToolTwo", "kvliteKeyOne", "kvliteKeyTwo"
_TEXT, _OTHER_TEXT, _ANSWER = "kvliteValueOne", "kvliteValueTwo", "kvliteAnswerHere"
_QUESTION, _THOUGHT = "kvliteQuestionHere", "kvliteThoughtHere"
_IDS = ("kvCallId1", "kvCallId2", "kvCallId3")
# What a form must predict: nested values, quotes, lines, nothing at all.
_HELD_OUT: dict[str, Any] = {
    "kvliteA": 'say "so"\nand <so>',
    "kvliteB": [1, {"deep": True}],
    "kvliteC": 2.5,
}
# Reasoning that a template does not show, but knows.
_PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)
_Style = JSONArguments | ParameterArguments
Calls = Sequence[tuple[str, Mapping[str, Any]]]


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)


class Probe:
    """What a tokenizer's chat template makes of an answer.

    Attributes:
        control: finds control tokens.
    """

    def __init__(self, tokenizer: Any, controls: Collection[str]) -> None:
        """`controls` are spellings of the control tokens."""
        self._tokenizer = tokenizer
        self.source = source_of(tokenizer, tools=True) or ""
        found = sorted(filter(None, controls), key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, found)) or "$^")

    def answer(self, calls: Calls = (), text: str = "", thought: str = "") -> str | None:
        """A conversation that ends with an answer; None if the template fails."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {"id": _IDS[at], "type": "function", "function": {"name": name, "arguments": args}}
                for at, (name, args) in enumerate(calls)
            ]
        if thought:
            message |= {"reasoning_content": thought, "thinking": thought}
        asked = {"role": "user", "content": _QUESTION}
        messages = normalized([asked, message], self.source)
        tries = [messages]
        if calls:
            tries.append(text_arguments(messages))
        for each in tries:
            try:
                return render(self._tokenizer, each, _TOOLS, add_generation_prompt=False)
            except ChatTemplateError:
                continue
        return None

    @cached_property
    def plain(self) -> str | None:
        """With a plain answer."""
        return self.answer(text=_ANSWER)

    def body(self, calls: Calls) -> str | None:
        """What the answer of these calls alone is; None if the template writes none."""
        shown = self.answer(calls)
        if shown is None or self.plain is None:
            return None
        begin = _common(shown, self.plain)
        tail = _common(shown[begin:][::-1], self.plain[begin:][::-1])
        end = len(shown) - tail
        for found in self.control.finditer(shown):
            if found.start() < begin < found.end():
                begin = found.start()
            if found.start() < end < found.end():
                end = found.end()
        return shown[begin:end]


def _tool(name: str) -> Tool:
    types = {_KEY: "string", _OTHER_KEY: "integer", "kvliteA": "string", "kvliteB": "array"}
    properties = {
        key: {"type": types.get(key, "number"), "description": "-"}
        for key in (_KEY, _OTHER_KEY, *_HELD_OUT)
    }
    return Tool(name, "-", {"type": "object", "properties": properties, "required": []})


_PROBED = [_tool(_ONE), _tool(_TWO)]
_TOOLS = normalized_tools([each.plain() for each in _PROBED])


# Tokens that end an answer with a call, whatever else does.
ENDS = ("<|eom_id|>", "<|tool_response>")


def answer_form(tokenizer: Any, ends: Collection[str] = ()) -> AnswerForm:
    """How a model writes answers, by its tokenizer's chat template; `ends` are control tokens that
    end one."""
    controls = Controls(tokenizer).spelled
    probe = Probe(tokenizer, controls)
    found = known(probe.source, controls)
    if found is None:
        reasoning = derived_reasoning(probe)
        return AnswerForm(derived_calls(probe, {*ends, *ENDS}, reasoning), reasoning)
    calls = found.form.calls
    if (
        calls is None
        or not found.rendered
        or _holds(calls, probe, partial(cleaned, ends=ENDS, left_out=None))
    ):
        return found.form
    _LOG.info("the chat template writes calls in a form that is not known: tools are left out")
    return replace(found.form, calls=None)


def derived_calls(
    probe: Probe, ends: Collection[str], left_out: ReasoningForm | None
) -> CallForm | None:
    """The form of calls; None if the template writes none, or in a way that is not one of these.
    `left_out` is reasoning, which some templates put before calls although there is none."""
    given, other = {_KEY: _TEXT, _OTHER_KEY: 31}, {_KEY: _OTHER_TEXT, _OTHER_KEY: 31}

    clean = partial(cleaned, ends=ends, left_out=left_out)
    one = clean(probe.body([(_ONE, given)]) or "")
    two = clean(probe.body([(_ONE, given), (_TWO, other)]) or "")
    if one.count(_ONE) != 1 or _TEXT not in one or one.startswith(tuple(ends)):
        return None
    first, _, rest = one.partition(_ONE)
    found: tuple[str, _Style, str] | None = _object(rest, given) or _parameters(probe, rest)
    if found is None:
        return None
    middle, style, last = found
    between, several = "", False
    if _TWO in two:
        after = two.partition(_ONE)[2]
        again = _around(style, after.partition(_TWO)[0], given)
        then = _around(style, after.partition(_TWO)[2], other)
        if again is not None and then is not None:
            between, several = again[1], True
            first, between = _counted(first, between)
            middle, _ = _counted(middle, then[0], from_end=False)
    form = CallForm(
        _slots(first), _slots(middle), _slots(between), _slots(last), style, several=several
    )
    return form if _holds(form, probe, clean) else None


def cleaned(body: str, ends: Collection[str], left_out: ReasoningForm | None) -> str:
    """An answer up to its end, without reasoning that is empty."""
    body = body[: min((at for each in ends if (at := body.find(each)) > 0), default=len(body))]
    if left_out is None:
        return body
    none = rf"\s*{re.escape(left_out.begin)}\s*{re.escape(left_out.end)}"
    return re.sub(none, "", body, count=1)


def _around(style: _Style, text: str, given: Mapping[str, Any]) -> tuple[str, str] | None:
    if isinstance(style, JSONArguments):
        found = _object(text, given)
        return None if found is None else (found[0], found[2])
    before, written, after = text.partition(style.written(given))
    return (before, after) if written else None


def _object(text: str, given: Mapping[str, Any]) -> tuple[str, JSONArguments, str] | None:
    for brace in re.finditer("{", text):
        try:
            read, size = json.JSONDecoder().raw_decode(text[brace.start() :])
        except ValueError:
            continue
        if read == given:
            at = brace.start()
            return text[:at], JSONArguments(), text[at + size :]
    return None


def _counted(one: str, other: str, *, from_end: bool = True) -> tuple[str, str]:
    """Pieces of a first and a second call with a slot in the place of their numbers."""
    if from_end:
        one, other = one[::-1], other[::-1]
    same = _common(one, other)
    if one[same : same + 1] == "0" and other[same : same + 1] == "1":
        one = f"{one[:same]}{INDEX}{one[same + 1 :]}"
        other = f"{other[:same]}{INDEX}{other[same + 1 :]}"
    return (one[::-1], other[::-1]) if from_end else (one, other)


def _parameters(probe: Probe, rest: str) -> tuple[str, ParameterArguments, str] | None:
    if not all(each in rest for each in (_KEY, _TEXT, _OTHER_KEY, "31")):
        return None
    before, _, more = rest.partition(_KEY)
    middle, _, more = more.partition(_TEXT)
    between, _, more = more.partition(_OTHER_KEY)
    before_json, _, after = more.partition("31")
    empty = (probe.body([(_ONE, {})]) or "").partition(_ONE)[2]
    for size in range(1, min(len(before), len(between)) + 1):
        begin, head, end = before[-size:], before[:-size], between[:-size]
        last = after[len(end) :]
        if (
            begin[0] == "<"
            and between.endswith(begin)
            and after.startswith(end)
            and empty == head + last
        ):
            return head, ParameterArguments(begin, middle, before_json, end), last
    return None


def _slots(text: str) -> str:
    for each in _IDS:
        text = text.replace(each, ID)
    return text


def _holds(form: CallForm, probe: Probe, clean: Callable[[str], str]) -> bool:
    """Whether other calls are read from what the template makes of them."""
    trials: list[Calls] = [[(_TWO, _HELD_OUT)], [(_TWO, {})]]
    if form.several:
        trials.append([(_TWO, {_KEY: _TEXT}), (_ONE, _HELD_OUT), (_ONE, {})])
    return all(_read(form, clean(probe.body(each) or "")) == [*each] for each in trials)


def _read(form: CallForm, written: str) -> list[tuple[str, Any]] | None:
    """The calls of an answer; None if it has anything else."""
    reader = AnswerReader(AnswerForm(form), _PROBED)
    parts = [*reader.push(written), *reader.flush()]
    if text_in(parts, "text") or text_in(parts, "reasoning"):
        return None
    try:
        return [(name, from_json(arguments)) for name, arguments in calls_in(parts)]
    except ValueError:
        return None


def derived_reasoning(probe: Probe) -> ReasoningForm | None:
    """What stands around reasoning; None if the template knows none."""
    shown = probe.answer(text=_ANSWER, thought=_THOUGHT) or ""
    before, found, after = shown.partition(_THOUGHT)
    if found and _ANSWER in after:
        begins = [*probe.control.finditer(before)]
        end = probe.control.search(after.partition(_ANSWER)[0])
        if begins and end:
            return ReasoningForm(before[begins[-1].start() :].strip(), end[0])
    pairs = (pair for pair in _PAIRS if all(each in probe.source for each in pair))
    return next((ReasoningForm(*pair) for pair in pairs), None)
