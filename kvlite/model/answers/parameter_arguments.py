"""Arguments one after the other, each with its name: strings as they are, other values as JSON."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvlite.model.answers.form import Tool
from kvlite.model.answers.rules import Rules
from kvlite.model.answers.schemas import followed, leave, standing
from kvlite.model.answers.values import (
    as_json,
    choices_of,
    is_text,
    overlap,
    properties_of,
    referred,
    types_of,
    value_of,
    within_text,
)
from kvlite.model.grammar import schema_rule

# What cannot be held to in a string that is written without quotes.
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
# The first part of what may follow arguments.
_TAG = re.compile(r"\S+?>|\S+")
_KEY = "/[^<>\"'\\n]{1,200}/"


@dataclass(frozen=True)
class ParameterArguments:
    """`begin`, name, `middle`, value, `end` of each.

    Attributes:
        before_json: in the place of `middle`, before values that are no strings.
    """

    begin: str
    middle: str
    before_json: str
    end: str
    opening: ClassVar[str] = ""

    def written(self, arguments: Mapping[str, Any]) -> str:
        """Arguments as a model writes them."""
        return "".join(
            f"{self.begin}{key}{self.middle}{value}{self.end}"
            if isinstance(value, str)
            else f"{self.begin}{key}{self.before_json}{as_json(value)}{self.end}"
            for key, value in arguments.items()
        )

    def rule(self, tool: Tool, rules: Rules, *, enforced: bool) -> str:
        """As of `form.Arguments`; in the order of the schema if they are enforced."""
        if not (enforced or tool.strict):
            any_of = rules.choice(map(rules.text, self.middles))
            one = f"{rules.text(self.begin)} {_KEY} {any_of} {rules.until(self.end)}"
            return f"{rules.named(one, 'parameter')}*"
        schema = followed(tool, rules.spelled)
        required = referred(schema, schema).get("required", ())
        written = list[str]()
        for key, each in properties_of(schema).items():
            value = self._value(tool, key, each, schema, rules)
            one = f"{rules.text(self.begin)} {rules.said(key)} {value}"
            written.append(rules.named(one, "parameter") + ("" if key in required else "?"))
        return " ".join(written)

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, *self.middles, self.end)

    @property
    def middles(self) -> tuple[str, ...]:
        """What may stand before a value."""
        return tuple(dict.fromkeys((self.middle, self.before_json)))

    def reader(self, parameters: Mapping[str, Any], after: Sequence[str]) -> "ParameterReader":
        return ParameterReader(self, parameters, after)

    def _value(
        self, tool: Tool, key: str, schema: Any, root: Mapping[str, Any], rules: Rules
    ) -> str:
        """A rule of what follows a parameter's name; where strings may, any text does."""
        if (kinds := types_of(schema, root)) and "string" not in kinds:
            value = schema_rule(standing(schema, root), lenient=not tool.strict)
            return f"{rules.text(self.before_json)} {value} {rules.text(self.end)}"
        said = referred(schema, root)
        if hard := next((each for each in _OF_STRINGS if each in said), None):
            why = f"{hard} of a string, which this model writes without quotes"
            leave(tool.name, f" property {key!r}", why, strict=tool.strict)
        if choices := choices_of(said):
            either = rules.choice(
                f"{rules.text(self.middle)} {rules.said(each)}"
                if isinstance(each, str)
                else f"{rules.text(self.before_json)} {rules.said(as_json(each))}"
                for each in choices
            )
            return f"{either} {rules.text(self.end)}"
        return f"{rules.text(self.middle)} {rules.until(self.end)}"


class ParameterReader:
    """Turns parameters into a JSON object as they come; strings are passed on at once."""

    def __init__(
        self, form: ParameterArguments, parameters: Mapping[str, Any], after: Sequence[str]
    ) -> None:
        found = (_TAG.match(each.strip()) for each in after)
        self._form, self._after = form, [each[0] for each in found if each]
        self._root, self._schemas = parameters, properties_of(parameters)
        self._held, self._written, self._key = "", 0, ""
        self._step = self._between

    def push(self, text: str) -> tuple[str, str | None]:
        self._held += text
        made, rest = "", None
        while rest is None:
            before = self._step, self._held
            more, rest = self._step()
            made += more
            if rest is None and before == (self._step, self._held):
                break
        return made, rest

    def flush(self) -> str:
        if self._step == self._text:
            return within_text(self._held)
        return "" if self._written else "{"

    def _between(self) -> tuple[str, str | None]:
        held, begin = self._held.lstrip(), self._form.begin.strip()
        if held.startswith(begin):
            self._held, self._step = held[len(begin) :], self._name
            return "", None
        if begin.startswith(held) or any(
            each.startswith(held) and each != held for each in self._after
        ):
            return "", None
        return ("}" if self._written else "{}"), held

    def _name(self) -> tuple[str, str | None]:
        keys = [key for key in self._schemas if self._held.lstrip().startswith(key)]
        known = len(self._held) - len(self._held.lstrip()) + len(max(keys, key=len, default=""))
        found = [(self._held.find(each.rstrip(), known), each) for each in self._form.middles]
        found = [each for each in found if each[0] >= 0]
        if not found:
            return "", None
        at, middle = min(found, key=lambda each: each[0])
        rest = self._held[at + len(middle.rstrip()) :]
        space = middle[len(middle.rstrip()) :]
        if space and len(rest) < len(space):
            return "", None
        self._key = self._held[:at].strip()
        self._held = rest.removeprefix(space)
        told = len(self._form.middles) > 1
        text = (
            middle == self._form.middle
            if told
            else is_text(self._schemas.get(self._key), self._root)
        )
        self._step = self._text if text else self._other
        made = (
            f"{', ' if self._written else '{'}{as_json(self._key)}: {'' if not text else chr(34)}"
        )
        self._written += 1
        return made, None

    def _text(self) -> tuple[str, str | None]:
        certain, rest = self._certain()
        text, self._held = self._held[:certain], self._held[certain if rest is None else rest :]
        if rest is None:
            return within_text(text), None
        self._step = self._between
        return f'{within_text(text)}"', None

    def _other(self) -> tuple[str, str | None]:
        certain, rest = self._certain()
        if rest is None:
            return "", None
        text, self._held = self._held[:certain], self._held[rest:]
        self._step = self._between
        allowed = types_of(self._schemas.get(self._key), self._root)
        return as_json(value_of(text, allowed)), None

    def _certain(self) -> tuple[int, int | None]:
        """How much of what is held is certainly the value's, and where what follows it begins, if
        that is known. An end is one if something follows that may; else it is a part of the value.
        """
        mark = self._form.end.strip()
        space = self._form.end[: len(self._form.end) - len(self._form.end.lstrip())]
        following = (self._form.begin.strip(), *self._after)
        at = self._held.find(mark)
        while at >= 0:
            rest = self._held[at + len(mark) :].lstrip()
            value = len(self._held[:at].removesuffix(space))
            if any(rest.startswith(each) for each in following):
                return value, at + len(mark)
            if any(each.startswith(rest) for each in following):
                return value, None
            at = self._held.find(mark, at + 1)
        kept = overlap(self._held, space + mark) or overlap(self._held, mark)
        return len(self._held) - kept, None
