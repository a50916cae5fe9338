"""Tools: how chat templates have models write calls of them, as a grammar, and read back."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvlite.model.grammar import schema_rule


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: the JSON Schema of its arguments.
        strict: whether all of that schema must be followed; else what cannot be is left out.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    def plain(self) -> dict[str, Any]:
        """As chat templates are told it."""
        said = {"name": self.name, "description": self.description}
        return {"type": "function", "function": {**said, "parameters": {**self.parameters}}}


@dataclass(frozen=True)
class Call:
    """A call of a tool; its `arguments` are JSON, unless the answer was cut in their midst."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolForm:
    """How a model writes calls: `begin`, then `head` name `middle` arguments `tail` of each, with
    `between` two of them, then `end`.

    Attributes:
        marked: whether what a call begins with is in no other text; else only an answer that
            begins so is one.
        several: whether an answer may have several calls.
    """

    head: str
    middle: str
    tail: str = ""
    begin: str = ""
    between: str = ""
    end: str = ""
    marked: bool = True
    several: bool = True


_JSON_LIST = ToolForm('{"name": "', '", "arguments": ', "}", "[TOOL_CALLS][", ", ", "]")
_FORMS = {  # the first whose words are all in a template
    ("[TOOL_CALLS]", "[ARGS]"): ToolForm("[TOOL_CALLS]", "[ARGS]"),
    ("[TOOL_CALLS]",): _JSON_LIST,
    ("<tool_call>", "</tool_call>"): ToolForm(
        '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n"
    ),
    ("tool_calls", '"parameters": '): ToolForm(
        '{"name": "', '", "parameters": ', "}", marked=False, several=False
    ),
}
# Templates with these have calls of another kind between the same marks.
_OTHERS = ("<function=", "<arg_key>")


def tool_form(tokenizer: Any) -> ToolForm | None:
    """How the tokenizer's chat template writes calls; None if it has no tools, or writes them in a
    way that is not known here."""
    if tokenizer.chat_template is None:
        return None
    template = tokenizer.get_chat_template(tools=[{}])
    if "tools" not in template or any(each in template for each in _OTHERS):
        return None
    found = (form for words, form in _FORMS.items() if all(each in template for each in words))
    return next(found, None)


def calls_grammar(
    form: ToolForm,
    tools: Sequence[Tool],
    tokenizer: Any,
    *,
    text: str = "",
    needed: bool = False,
    several: bool = True,
) -> str:
    """A grammar, in Lark, of answers that may call tools.

    Args:
        text: a rule for answers without a call; "" for any text, which may precede calls, too.
        needed: whether there must be a call.
        several: whether there may be more than one, where the form has that.
    """
    literal = partial(_literal, tokenizer)
    mark, opening = _parted(form.begin + form.head)
    marked, called = literal(mark), list[str]()
    for tool in tools:
        name = json.dumps(tool.name, ensure_ascii=False)[1:-1]
        arguments = schema_rule({"type": "object", **tool.parameters}, lenient=not tool.strict)
        called.append(f"{literal(name + form.middle)} {arguments} {literal(form.tail)}")
    if needed:
        start = f"{marked} calls"
    elif text or not form.marked:
        start = f"{marked} calls | {text or 'OTHER'}"
    elif marked.startswith("<"):
        start = f"TEXT | TEXT {marked} calls"
    else:
        start = "TEXT | until calls"
    more = f"({literal(form.between + form.head)} call)*" if several and form.several else ""
    rules = [
        f"start: {start}",
        f"calls: {literal(opening)} call {more} {literal(form.end)}",
        f"call: {' | '.join(called)}",
        f"until[lazy]: TEXT {marked}" if start.endswith("until calls") else "",
        r"OTHER: /([^{ \n\t](.|\n)*)?/" if start.endswith("OTHER") else "",
        r"TEXT: /(.|\n)*/" if "TEXT" in start or "until" in start else "",
    ]
    return "\n".join(rules)


def _parted(first: str) -> tuple[str, str]:
    """What a call begins with, parted after the mark that tells it from text."""
    closing = {"<": ">", "[": "]"}.get(first[0], first[0])
    end = first.index(closing) + 1
    return first[:end], first[end:]


def _literal(tokenizer: Any, text: str) -> str:
    """A text in Lark; what the tokenizer has as special tokens, as these."""
    special = _special(tokenizer, text)
    if not special:
        return json.dumps(text, ensure_ascii=False) if text else ""
    number, spelled = next(iter(special.items()))
    before, _, after = text.partition(spelled)
    return f"{_literal(tokenizer, before)} <[{number}]> {_literal(tokenizer, after)}".strip()


def _special(tokenizer: Any, text: str) -> dict[int, str]:
    """The special tokens that a text spells."""
    added = tokenizer.added_tokens_decoder.items()
    return {number: each.content for number, each in added if each.special and each.content in text}


class CallReader:
    """Reads an answer as it comes: text, then calls, each as soon as it is whole."""

    def __init__(self, form: ToolForm, tokenizer: Any) -> None:
        self._form, self._held, self._inside = form, "", False
        self._said = self._called = False
        self._special = _special(tokenizer, form.begin + form.head + form.middle)

    def push(self, token_id: int | None, text: str) -> tuple[str, list[Call]]:
        """What is certain with one more token, whose text leaves out special ones; white space
        that may belong to a call is held back."""
        self._held += text + ("" if token_id is None else self._special.get(token_id, ""))
        said, calls = "" if self._inside or self._called else self._text(), list[Call]()
        while (call := self._call()) is not None:
            calls.append(call)
        return said, calls

    def flush(self) -> tuple[str, list[Call]]:
        """The rest, at the end of an answer: text, or a call that was cut."""
        held, self._held = self._held, ""
        name, middle, arguments = held.partition(self._form.middle)
        if self._inside:
            return "", [Call(json.loads(f'"{name}"'), arguments)] if middle else []
        return "" if self._called or not held.strip() else held, []

    def _text(self) -> str:
        """Text before the first call, or before what may be one."""
        form, held = self._form, self._held
        start = form.begin + form.head
        if not form.marked:  # the answer begins with a call, or has none
            if self._said or not start.startswith(held.lstrip()[: len(start)]):
                self._said, self._held = True, ""
                return held
            self._inside = held.lstrip().startswith(start)
            self._held = held.lstrip()[len(start) :] if self._inside else held
            return ""
        at = held.find(start)
        self._inside = at >= 0
        if at < 0:
            most = min(len(start) - 1, len(held))
            overlaps = (n for n in range(most, 0, -1) if held.endswith(start[:n]))
            at = len(held) - next(overlaps, 0)
        text = held[:at].rstrip()
        self._held = held[at + len(start) :] if self._inside else held[len(text) :]
        return text

    def _call(self) -> Call | None:
        """The next call, once its arguments are whole."""
        form = self._form
        if self._called and not self._inside and self._held.startswith(form.between + form.head):
            self._inside = True
            self._held = self._held[len(form.between + form.head) :]
        name, middle, rest = self._held.partition(form.middle)
        if not (self._inside and middle):
            return None
        try:
            _, end = json.JSONDecoder().raw_decode(rest)
        except ValueError:
            return None
        if not rest.startswith(form.tail, end):
            return None
        self._held, self._inside, self._called = rest[end + len(form.tail) :], False, True
        return Call(json.loads(f'"{name}"'), rest[:end])
