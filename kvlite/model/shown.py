"""A conversation in its chat template, in the first form that the template takes."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvlite.documents import whole_characters
from kvlite.errors import ChatTemplateError
from kvlite.model.control_tokens import Controls
from kvlite.model.input_marks import InputMarks, Rendering, each_text, texts_in
from kvlite.model.jinja_template import GIVEN, render, source_of
from kvlite.model.template_messages import Messages, described, normalized, normalized_tools, ways

_LOG = logging.getLogger("kvlite.templates")
Pair = tuple[Rendering, Rendering]


def shown_by_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    *,
    answers: bool = True,
) -> Pair:
    """A conversation rendered with marks inside the control tokens of what is said, and with marks
    around all that is said; with `answers`, up to what begins an answer. What the template refuses
    or leaves out is brought into another form, which the log says. Raises ChatTemplateError if the
    template refuses every form, or fails."""
    source = source_of(tokenizer, bool(tools)) or ""
    plain = each_text(normalized(messages, source), whole_characters)
    told = each_text(normalized_tools(tools), whole_characters)
    given = {name: each for name, each in (variables or {}).items() if name not in GIVEN}
    given = each_text(given, whole_characters)
    marks = InputMarks(Controls(tokenizer).spelled, plain, told, given, source)

    def shown(form: Messages, tools: Messages) -> Pair:
        inside = marks.inside(given)
        write = partial(render, tokenizer, variables=inside, add_generation_prompt=answers)
        first = write(marks.inside(form), marks.inside(tools))
        try:
            second = write(marks.around(form), marks.around(tools))
        except ChatTemplateError:  # it looks at the ends of what is said
            second = first
        return marks.found(first), marks.found(second)

    def tried(form: Messages) -> Pair:
        try:
            return shown(form, told)
        except ChatTemplateError:
            if (filled := described(told)) == told:
                raise
            return shown(form, filled)

    best, fewest, failure = None, 0, None
    for form, changes in ((plain, ()), *ways(plain)):
        try:
            pair = tried(form)
        except ChatTemplateError as error:
            failure = failure or error
            continue
        lost = _lost(form, pair[1])
        if best is None or lost < fewest:
            best, fewest = (pair, changes), lost
        if not lost:
            break
    if best is None:
        assert failure is not None
        raise failure
    pair, changes = best
    if changes:
        said = "refuses these messages" if failure else "leaves out a part of these messages"
        _LOG.info("the chat template %s, and is given %s", said, ", ".join(changes))
    return pair


def _lost(messages: Messages, shown: Rendering) -> int:
    if not shown.shown:  # it is not known
        return 0
    lost = 0
    for each in messages:
        text = each["content"].strip()
        lost += bool(text) and each["role"] != "assistant" and text not in shown.shown
        for call in each.get("tool_calls", ()):
            texts = texts_in(call["function"]["arguments"])
            lost += not shown.shown.issuperset(texts)
    return lost
