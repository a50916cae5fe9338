"""The tokens that end an answer, one of them by the model's own chat template.

Files often name another token as the end, such as the one that ends a document.
"""

from typing import Any

from kvlite.errors import ChatTemplateError
from kvlite.model.control_tokens import Controls
from kvlite.model.jinja_template import render, source_of

# Words that no template contains, and that templates which look for reasoning or tools leave alone.
_QUESTION, _ANSWER = "kvliteQuestionHere", "kvliteAnswerHere"


def end_of_turn(tokenizer: Any) -> int | None:
    """The control token that follows an answer in the chat template; None if the template has
    none, fails, or there is no template."""
    if source_of(tokenizer) is None:
        return None
    asked = {"role": "user", "content": _QUESTION}
    told = [asked, {"role": "assistant", "content": _ANSWER}]
    try:
        controls = Controls(tokenizer)
        # Some templates end a turn by beginning the next one, and say more of the last one.
        for messages in (told, [*told, asked]):
            shown = render(tokenizer, messages, add_generation_prompt=False)
            _, answer, after = shown.rpartition(_ANSWER)
            after = after.partition(_QUESTION)[0] if answer else ""
            if found := controls.among(controls.encoded(after)):
                return found[0]
    except ChatTemplateError:
        return None
    return None


def stop_ids(module: Any, tokenizer: Any) -> frozenset[int]:
    """All tokens that end an answer: those that the generation config and the tokenizer name, and
    the chat template's."""
    ids: set[int] = set()
    for source in (module.generation_config.eos_token_id, tokenizer.eos_token_id):
        if source is not None:
            ids.update(source if isinstance(source, list) else [source])
    if (ends := end_of_turn(tokenizer)) is not None:
        ids.add(ends)
    return frozenset(ids)
