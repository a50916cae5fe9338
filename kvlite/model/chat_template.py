"""Prompts: documents and a question as one message, and a message in the chat template."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from threading import Event
from typing import Any

from kvlite.documents import Document, whole_characters
from kvlite.errors import ChatTemplateError, SettingError
from kvlite.model.control_tokens import Controls
from kvlite.model.input_marks import Rendering
from kvlite.model.shown import Pair, shown_by_template
from kvlite.model.template_messages import text_of
from kvlite.model.text_limit import tokenized

# A placeholder for what was answered; no chat template contains this word.
_ANSWER = "kvliteAnswerHere"

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
    tokenizer: Any,
    text: str,
    *,
    opening: bool,
    first: bool,
    system: str = "",
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The tokens that a user's message adds to a conversation, in the tokenizer's chat template if
    it has one: all from the start if it is the `opening`, else all that follows the last answer.

    Control tokens spelled out in the message, or in `system`, are encoded as characters, so that a
    document cannot end the user's turn.

    Args:
        opening: it is the first message.
        first: nothing at all was read before.
        system: the system message, which precedes the first message.
        variables: of the template.
    """
    parts = said_parts(
        tokenizer, text, opening=opening, first=first, system=system, variables=variables
    )
    return [token for part in parts for token in part.ids]


def said_parts(
    tokenizer: Any,
    text: str,
    *,
    opening: bool,
    first: bool,
    system: str = "",
    variables: Mapping[str, Any] | None = None,
) -> list[Part]:
    """The parts that `said_tokens` encodes one after the other; the arguments are the same."""
    if tokenizer.chat_template is not None:
        shown = partial(shown_by_template, tokenizer, variables=variables)
        return _turn_parts(tokenizer, text, shown, opening=opening, system=system)
    told = f"{system}\n\n" if system and opening else ""
    return [_text_part(tokenizer, told + text, first=first)]


def chat_tokens(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    *,
    continues: bool = False,
) -> list[int]:
    """The tokens of a whole conversation up to where the next answer begins. Control tokens spelled
    out in what is said are encoded as characters, wherever the template puts it. Raises
    SettingError if the tokenizer has no chat template; ChatTemplateError if the template refuses
    these messages in every form, or fails.

    Args:
        messages: each a `role` and a `content`; also `tool_calls`, and whose result it is.
        tools: that the model may call, as OpenAI's API has them.
        variables: of the template, such as `enable_thinking`.
        continues: the last message is the beginning of the next answer.
    """
    if tokenizer.chat_template is None:
        raise SettingError(
            "this model has no chat template, so that it takes no messages: send one text "
            "(/v1/completions), or use an instruction-tuned model"
        )
    begun = text_of(messages[-1].get("content")) if continues else ""
    if continues and not begun.strip():
        continues, messages = False, messages[:-1]
    shown = shown_by_template(tokenizer, messages, tools, variables, answers=not continues)
    if continues:
        cut = [each.until(whole_characters(begun)) for each in shown]
        if cut[0] is None or cut[1] is None:
            raise ChatTemplateError(
                "this model's chat template changes the answer that is to go on: leave it out"
            )
        shown = cut[0], cut[1]
    return [token for part in _parts(tokenizer, *shown) for token in part.ids]


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


def _turn_parts(
    tokenizer: Any, text: str, shown_as: Callable[..., Pair], *, opening: bool, system: str
) -> list[Part]:
    """The parts of a message in the template. A later turn is cut out of a conversation with a
    placeholder for the past: the real past is in the cache as it was said, so templates that trim
    or drop parts of it have no say."""
    message = {"role": "user", "content": text}
    if not opening:
        past = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        shown = shown_as([*past, message])
        rest = [each.after(_ANSWER) for each in shown]
        if rest[0].text and rest[1].text:  # else the template shows no past
            return _parts(tokenizer, *rest)
    told = [{"role": "system", "content": system}] if system and opening else []
    return _parts(tokenizer, *shown_as([*told, message]))


def _parts(tokenizer: Any, plain: Rendering, bounded: Rendering) -> list[Part]:
    """One part; or several where the template's text and what was said would form control tokens
    if they were encoded together.

    Args:
        plain, bounded: of the same messages, with marks inside their control tokens alone, and
            around all that was said.
    """
    controls = Controls(tokenizer)
    # A template may look at the ends of what was said. That may be so if it makes no control.
    own = (_controls_of(controls, each) for each in (plain, bounded))
    if plain.text != bounded.text and next(own) == next(own):
        return _spliced(controls, plain)
    return _spliced(controls, bounded)


def _spliced(controls: Controls, shown: Rendering) -> list[Part]:
    options = {"add_special_tokens": False}
    expected = partial(_controls_of, controls, shown)
    if (made := controls.outside(shown.text, shown.spans, expected)) is not None:
        return [Part(shown.text, made.ids, options, made.begins)]
    pieces = _pieces(shown)
    own = [Part(piece, controls.encoded(piece), options) for piece in pieces[::2]]
    said = [(piece, controls.alone(piece)) for piece in pieces[1::2]]
    apart = [Part(piece, each.ids, options, each.begins) for piece, each in said]
    return [own[0], *chain.from_iterable(zip(apart, own[1:], strict=True))]


def _controls_of(controls: Controls, shown: Rendering) -> list[int]:
    """Those of the template's own text."""
    own = (controls.encoded(piece) for piece in _pieces(shown)[::2])
    return [token for ids in own for token in controls.among(ids)]


def _pieces(shown: Rendering) -> list[str]:
    edges = [0, *chain.from_iterable(shown.spans), len(shown.text)]
    return [shown.text[begin:end] for begin, end in pairwise(edges)]


def tokens_of(
    tokenizer: Any,
    text: str,
    max_context: int,
    cancel: Event | None = None,
    called: str = "",
    said: Mapping[str, Any] | None = None,
) -> int:
    """How many tokens a text has, without the template, or as the first message, `said` with other
    arguments of `said_tokens`; `called` are the names of its documents. Raises ContextError if
    there are more than the model was trained for; Stopped if `cancel` was set."""
    encode = partial(text_tokens, tokenizer, text, first=True)
    if said is not None:
        encode = partial(said_tokens, tokenizer, text, opening=True, first=True, **said)
    return len(tokenized(encode, tokenizer, text, max_context, cancel, called))
