"""Whether a model reasons: what tells its template, and whether a prompt begins reasoning."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvlite.errors import ChatTemplateError
from kvlite.model.answers.form import AnswerForm
from kvlite.model.jinja_template import render

# Variables of templates, all of which are given: a template looks at its own.
_SWITCH: Mapping[str, Mapping[str, Any]] = {
    "auto": {},
    "on": {"enable_thinking": True, "thinking": True, "reasoning": True},
    "off": {"enable_thinking": False, "thinking": False, "reasoning": False, "thinking_budget": 0},
}
NO_SWITCH = (
    "--thinking {} changes nothing: this model's chat template has no switch between reasoning and "
    "answering at once"
)
NO_REASONING = (
    "--reasoning-budget {} changes nothing: this model's chat template has no reasoning that ends "
    "with a token of its own"
)
# Tokens at the end of a prompt that may be what begins reasoning.
PROMPT_END = 32


def thinking_variables(thinking: str) -> dict[str, Any]:
    """What a template is given for the setting `thinking`."""
    return {**_SWITCH[thinking]}


def has_switch(tokenizer: Any) -> bool:
    """Whether a chat template makes anything of the setting `thinking`."""
    asked = [{"role": "user", "content": "?"}]
    try:
        on, off = (render(tokenizer, asked, (), _SWITCH[each]) for each in ("on", "off"))
    except ChatTemplateError:
        return False
    return on != off


def ends_with_token(form: AnswerForm, tokenizer: Any) -> bool:
    """Whether reasoning ends with a token of its own, so that it can be limited."""
    added = (each.content for each in tokenizer.added_tokens_decoder.values())
    return form.reasoning is not None and form.reasoning.end in added


def spelled_in(form: AnswerForm, tokenizer: Any, ends: Collection[int]) -> dict[int, str]:
    """Special tokens that stand around or within reasoning and calls, but for those that end an
    answer."""
    if not (pieces := form.pieces):
        return {}
    return {
        number: each.content
        for number, each in tokenizer.added_tokens_decoder.items()
        if each.special and number not in ends and each.content in pieces
    }


def opens_reasoning(form: AnswerForm, tokenizer: Any, ids: Sequence[int]) -> bool:
    """Whether a prompt ends with what begins reasoning."""
    if form.reasoning is None:
        return False
    end: str = tokenizer.decode([*ids[-PROMPT_END:]], skip_special_tokens=False)
    return end.rstrip().endswith(form.reasoning.begin)
