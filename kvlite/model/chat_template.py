"""Prompts: documents and a question as one message, and a message in the chat template."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from threading import Event
from typing import Any

from kvlite.documents import Document, whole_characters
from kvlite.errors import ModelError, SettingError, reason
from kvlite.model.control_tokens import Controls
from kvlite.model.text_limit import tokenized

# Placeholders for what was said; no chat template contains these words.
_ANSWER, _SYSTEM, _TEXT = "kvliteAnswerHere", "kvliteSystemHere", "kvliteTextHere"

# Between documents, and before the question.
BETWEEN = "\n\n"


@dataclass(frozen=True)
class Part:
    """Text that is encoded by itself.

    Attributes:
        ids: its tokens.
        options: for the tokenizer, to encode it the same way.
        begins: where in the text each token begins, if the tokenizer would encode it otherwise.
    """

    text: str
    ids: list[int]
    options: dict[str, bool]
    begins: list[int] | None = None


def question_about(documents: Sequence[Document], question: str) -> str:
    """One user message: every document under its name, then the question. The question comes last,
    so that methods choose what the cache keeps with the question in view."""
    return f"{all_of(documents)}{BETWEEN}{asked_of(documents, question)}"


def all_of(documents: Sequence[Document]) -> str:
    """How `question_about` begins: every document under its name."""
    return BETWEEN.join(f"{name_of(document)}{body_of(document)}" for document in documents)


def name_of(document: Document) -> str:
    """The line before a document's text."""
    return f"Document: {document.name}\n\n"


def body_of(document: Document) -> str:
    """A document's text as the model is told it."""
    return document.text.strip()


def asked_of(documents: Sequence[Document], question: str) -> str:
    """How `question_about` ends: a question about documents that were read before."""
    it = "the document" if len(documents) == 1 else "the documents"
    return f"Based on {it} above, answer this question: {question.strip()}"


def certain(encoded: Callable[[str], list[int]], text: str) -> list[int]:
    """The tokens that a text begins with, however it goes on; `encoded` tokenizes a whole text."""
    ids = encoded(text)
    for ending in (" a", "\n\na", ".", "a"):
        pairs = zip(ids, encoded(text + ending), strict=False)
        ids = ids[: next((at for at, (one, other) in enumerate(pairs) if one != other), len(ids))]
    return ids


def goes_on(ids: list[int], ahead: list[int]) -> bool:
    """Whether `ids` begins with `ahead`, which was read already, and is longer."""
    return len(ids) > len(ahead) and ids[: len(ahead)] == ahead


def said_tokens(
    tokenizer: Any, text: str, *, opening: bool, first: bool, system: str = ""
) -> list[int]:
    """The tokens that a user's message adds to a conversation, in the tokenizer's chat template if
    it has one: all from the start if it is the `opening`, else all that follows the last answer.

    Control tokens spelled out in the message, or in `system`, are encoded as characters, so that a
    document cannot end the user's turn.

    Args:
        opening: it is the first message.
        first: nothing at all was read before.
        system: the system message, which precedes the first message.
    """
    parts = said_parts(tokenizer, text, opening=opening, first=first, system=system)
    return [token for part in parts for token in part.ids]


def said_parts(
    tokenizer: Any, text: str, *, opening: bool, first: bool, system: str = ""
) -> list[Part]:
    """The parts that `said_tokens` encodes one after the other; the arguments are the same."""
    if tokenizer.chat_template is not None:
        return _turn_parts(tokenizer, text, opening=opening, system=system)
    told = f"{system}\n\n" if system and opening else ""
    return [_text_part(tokenizer, told + text, first=first)]


def chat_tokens(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
) -> list[int]:
    """The tokens of a whole conversation up to where the next answer begins. Control tokens spelled
    out in messages are encoded as characters.

    Args:
        messages: each a `role` and a `content`; also `tool_calls`, and whose result it is.
        tools: that the model may call, as templates are told them.

    Raises:
        SettingError: the tokenizer has no chat template, its template refuses these messages, or a
            tool or a call spells a control token.
    """
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise SettingError(
            "this model has no chat template, so that it takes no messages: send one text "
            "(/v1/completions), or use an instruction-tuned model"
        )
    said = [{**each, "content": whole_characters(each["content"])} for each in messages]
    _require_harmless(tokenizer, [*tools, *(each.get("tool_calls") for each in messages)])
    try:
        real = _rendered(tokenizer, said, tools)
    except TemplateError as error:
        if [each["role"] for each in said[:2]] == ["system", "user"]:  # it has no system role
            first, second, *rest = said
            both = f"{first['content']}\n\n{second['content']}"
            return chat_tokens(tokenizer, [{**second, "content": both}, *rest], tools)
        raise SettingError(f"this model's chat template refuses these messages: {error}") from None
    named = {f"kvliteMessage{number}Here": each for number, each in enumerate(said)}
    shown = _rendered(
        tokenizer,
        [{**each, "content": _around(name, each["content"])} for name, each in named.items()],
        tools,
    )
    told: dict[str, str] = {name: each["content"].strip() for name, each in named.items()}
    pieces = [told.get(piece, piece) for piece in re.split("(kvliteMessage[0-9]+Here)", shown)]
    if "".join(pieces) != real:
        return _changed_part(tokenizer, shown, real).ids
    return [token for part in _spliced(tokenizer, pieces) for token in part.ids]


def text_tokens(tokenizer: Any, text: str, *, first: bool) -> list[int]:
    """The tokens of a text, none of them a control token but those that the tokenizer puts before
    the `first` text."""
    return _text_part(tokenizer, text, first=first).ids


def _text_part(tokenizer: Any, text: str, *, first: bool) -> Part:
    text, options = whole_characters(text), {"add_special_tokens": first}
    ids, controls = tokenizer.encode(text, **options), Controls(tokenizer)
    around = tokenizer.encode("", **options)
    if controls.among(ids) == controls.among(around):
        return Part(text, ids, options)
    alone = controls.alone(text)
    begins = None if alone.begins is None else [*(0 for _ in around), *alone.begins]
    return Part(text, around + alone.ids, options, begins)


def _turn_parts(tokenizer: Any, text: str, *, opening: bool, system: str) -> list[Part]:
    """One part; or three and more where the template's text and what was said would form control
    tokens if they were encoded together."""
    text, system = whole_characters(text), whole_characters(system)
    told = {_SYSTEM: system.strip(), _TEXT: text.strip()}
    shown = _shown(tokenizer, _around(_TEXT, text), system and _around(_SYSTEM, system), opening)
    if _TEXT not in shown:
        return [_changed_part(tokenizer, shown, _shown(tokenizer, text, system, opening))]
    pieces = [told.get(piece, piece) for piece in re.split(f"({_SYSTEM}|{_TEXT})", shown)]
    return _spliced(tokenizer, pieces)


def _spliced(tokenizer: Any, pieces: Sequence[str]) -> list[Part]:
    """The parts of a template's text and what was said, in turns."""
    controls = Controls(tokenizer)
    own = [_plain_part(tokenizer, piece) for piece in pieces[::2]]
    expected = [token for part in own for token in controls.among(part.ids)]
    whole = _plain_part(tokenizer, "".join(pieces))
    if controls.among(whole.ids) == expected:
        return [whole]
    edges = [*accumulate(map(len, pieces), initial=0)]
    spans = [*zip(edges[1:-1:2], edges[2::2], strict=True)]
    made = controls.outside(whole.text, spans, expected)
    if made is not None:
        return [Part(whole.text, made.ids, whole.options, made.begins)]
    said = [(piece, controls.alone(piece)) for piece in pieces[1::2]]
    apart = [Part(piece, each.ids, whole.options, each.begins) for piece, each in said]
    return [own[0], *chain.from_iterable(zip(apart, own[1:], strict=True))]


def _changed_part(tokenizer: Any, empty: str, shown: str) -> Part:
    """The text of a template that changes or omits what was said.

    Args:
        empty: the template's text for a message without control tokens.

    Raises:
        SettingError: what was said added control tokens, and it is not known where.
    """
    controls, part = Controls(tokenizer), _plain_part(tokenizer, shown)
    if controls.among(part.ids) != controls.among(_plain_part(tokenizer, empty).ids):
        raise SettingError(
            "this model's chat template changes what it is told, and control tokens would come out "
            "of this text: say it without them"
        )
    return part


def _plain_part(tokenizer: Any, text: str) -> Part:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return Part(text, ids, {"add_special_tokens": False})


def _shown(tokenizer: Any, text: str, system: str, opening: bool) -> str:
    """A message in the template. Raises ModelError if the template refuses it."""
    from jinja2 import TemplateError

    try:
        return _in_turn(tokenizer, text, system, opening)
    except TemplateError as error:
        raise _faulty(error) from error


def _in_turn(tokenizer: Any, text: str, system: str, opening: bool) -> str:
    """A message in the template. A later turn is cut out of a conversation with a placeholder for
    the past: the real past is in the cache as it was said, so templates that trim or drop parts of
    it have no say."""
    message = {"role": "user", "content": text}
    if opening and system:
        return _with_system(tokenizer, system, message)
    alone = _rendered(tokenizer, [message])
    if opening:
        return alone
    past = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    # A template that shows no past gets the message alone.
    return _rendered(tokenizer, [*past, message]).partition(_ANSWER)[2] or alone


def _with_system(tokenizer: Any, system: str, message: dict[str, str]) -> str:
    """A first message after a system message, which the text begins with if the template has no
    system role."""
    from jinja2 import TemplateError

    try:
        shown = _rendered(tokenizer, [{"role": "system", "content": system}, message])
    except TemplateError:
        shown = ""
    if system.strip() in shown:
        return shown
    return _rendered(tokenizer, [message | {"content": f"{system}\n\n{message['content']}"}])


def _around(standin: str, text: str) -> str:
    """A placeholder for a text, with the white space around it."""
    begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
    return f"{text[:begin]}{standin}{text[max(begin, end) :]}"


def _rendered(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
) -> str:
    """Messages in the template.

    Raises:
        TemplateError: the template is faulty, or refuses them.
        ModelError: it fails in another way.
    """
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(
            messages, tools=[*tools] or None, tokenize=False, add_generation_prompt=True
        )
    except TemplateError:
        raise
    except Exception as error:  # a stranger's template fails in any way
        raise _faulty(error) from error
    return text


def _faulty(error: Exception) -> ModelError:
    return ModelError(
        f"this model's chat template cannot be used ({reason(error)}): get the model again, or "
        "another file of it"
    )


def _require_harmless(tokenizer: Any, values: Sequence[Any]) -> None:
    """Raises SettingError if a text in these values spells a control token."""
    if not any(values):
        return
    text = json.dumps(values, ensure_ascii=False)
    ids = tokenizer.encode(whole_characters(text), add_special_tokens=False)
    if found := Controls(tokenizer).among(ids):
        raise SettingError(
            f"a tool, or a call of one, has {tokenizer.decode(found[:1])!r} in it, which is a "
            "control token of this model: say it without"
        )


def tokens_of(
    tokenizer: Any, text: str, max_context: int, cancel: Event | None = None, called: str = ""
) -> int:
    """How many tokens a text has, without the template.

    Args:
        called: the names of its documents, for an error.

    Raises:
        ContextError: more than the model was trained for.
        Stopped: `cancel` was set.
    """
    encode = partial(text_tokens, tokenizer, text, first=True)
    return len(tokenized(encode, tokenizer, text, max_context, cancel, called))
