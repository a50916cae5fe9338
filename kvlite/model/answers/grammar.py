"""A grammar, in llguidance's variant of Lark, of answers that may call tools, and of reasoning."""

from collections.abc import Collection, Sequence
from typing import Any

from kvlite.model.answers.form import AnswerForm, CallForm, Tool
from kvlite.model.answers.rules import ANY, Rules

# Calls of an answer: small models that must call would go on as long as the context lasts.
MOST_CALLS = 32
_SPACE = "/[ \\n]{0,4}/"


def answer_grammar(
    form: AnswerForm,
    tokenizer: Any,
    trie: Any,
    tools: Sequence[Tool] = (),
    *,
    text: str = "",
    needed: bool = False,
    several: bool = True,
    opened: bool = False,
    most_reasoning: int | None = None,
    ends: Collection[int] = (),
) -> str:
    """A grammar of answers; "" if nothing is to be enforced.

    Unless a call is needed, text is free up to what tells a call from it. From there on the names
    of tools are enforced, and the schemas of those that are strict; all schemas where a call is
    needed. Raises SettingError if a strict tool has a schema that cannot be enforced.

    Args:
        trie: llguidance's, of the tokenizer.
        text: a rule for answers without a call; "" for any text.
        needed: whether there must be a call.
        several: whether there may be more than one, where the form has that.
        opened: whether the prompt begins reasoning.
        most_reasoning: tokens of it.
        ends: tokens that end an answer, which reasoning has none of.
    """
    rules = Rules(tokenizer, trie)
    body, is_free = text, not (text or needed)
    form_of_calls = form.calls if tools else None
    if form_of_calls is not None:
        calls = _Calls(form_of_calls, tools, rules, enforced=needed, several=several)
        if needed:
            body = f"{_SPACE} {calls.rule(calls.opening)}"
        elif text:
            body = rules.choice([text, calls.rule(calls.opening)])
        else:
            body = calls.after_text()
    if is_free and most_reasoning is None:
        return "\n".join([f"start: {body}", *rules.lines]) if body else ""
    if form_of_calls and (call := rules.control(form_of_calls.trigger)) is not None:
        ends = [*ends, call]  # it would end reasoning
    thought = _reasoning(form, rules, ends, most_reasoning, opened=opened)
    return "\n".join([f"start: {thought} {body or '<[*]>*'}", *rules.lines])


class _Calls:
    def __init__(
        self, form: CallForm, tools: Sequence[Tool], rules: Rules, *, enforced: bool, several: bool
    ) -> None:
        self.form, self.rules = form, rules
        self._several = several and form.several
        self._strict = any(tool.strict for tool in tools)
        self.opening = rules.text(form.first.lstrip())
        if enforced or self._strict:
            made = (
                f"{rules.said(tool.name)} {rules.text(form.middle)} "
                + form.arguments.rule(tool, rules, enforced=enforced)
                for tool in tools
            )
            self._call = rules.named(" | ".join(made), "call")
        else:
            names = rules.choice(rules.said(tool.name) for tool in tools)
            arguments = form.arguments.rule(tools[0], rules, enforced=False)
            self._call = rules.named(f"{names} {rules.text(form.middle)} {arguments}", "call")

    def rule(self, opening: str) -> str:
        more = (
            f"({self.rules.text(self.form.between)} {self._call}){{0,{MOST_CALLS - 1}}}"
            if self._several
            else ""
        )
        last = self.form.last.rstrip()
        space = self.rules.text(self.form.last[len(last) :])
        parts = (opening, self._call, more, self.rules.text(last), space and f"{space}?")
        return self.rules.named(" ".join(filter(None, parts)), "calls")

    def after_text(self) -> str:
        """A rule of text that calls may follow; "" if they cannot be told from it by a token, and
        need not."""
        form, rules = self.form, self.rules
        if (control := rules.control(form.trigger)) is not None:
            text = rules.named(f"{rules.free([control])}*", "text")
            return f"{text} {self.rule(self.opening)}?"
        if not self._strict:
            return ""
        if not form.trigger:
            return f"({self.rule(self.opening)} | /([^{{ \\n\\t](.|\\n)*)?/)"
        rest = rules.text(form.first.lstrip()[len(form.trigger) :])
        opening = f"{rules.until(form.trigger)} {rest}"
        return f"({ANY} | {self.rule(opening)})"


def _reasoning(
    form: AnswerForm, rules: Rules, ends: Collection[int], most: int | None, *, opened: bool
) -> str:
    if form.reasoning is None:
        return ""
    end = rules.control(form.reasoning.end)
    if end is None:
        thought = rules.until(form.reasoning.end)
    else:
        times = "*" if most is None else f"{{0,{most}}}"
        within = "" if most == 0 else f"{rules.free([end, *ends])}{times} "
        thought = f"{within}<[{end}]>"
    if opened:
        return f"{thought} {_SPACE}"
    return f"({rules.text(form.reasoning.begin)} {thought} {_SPACE})?"
