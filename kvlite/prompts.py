"""What the model is told: documents and a question as one message, a message as a turn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvlite.documents import Document, whole_characters
from kvlite.errors import SettingError

_ANSWER, _TEXT = "<kvlite answer>", "<kvlite text>"

# Between documents, and before the question.
BETWEEN = "\n\n"


@dataclass(frozen=True)
class Part:
    """Text that is encoded by itself.

    Attributes:
        options: of the tokenizer's `encode`.
    """

    text: str
    options: dict[str, bool]

    def tokens(self, tokenizer: Any) -> list[int]:
        """Its tokens."""
        ids: list[int] = tokenizer.encode(self.text, **self.options)
        return ids


def question_about(documents: Sequence[Document], question: str) -> str:
    """One user message: every document under its name, then the question.

    The question comes last, so that what the cache keeps is chosen with it in view.
    """
    return f"{all_of(documents)}{BETWEEN}{asked_of(documents, question)}"


def all_of(documents: Sequence[Document]) -> str:
    """What such a message begins with: every document under its name."""
    return BETWEEN.join(f"{name_of(document)}{body_of(document)}" for document in documents)


def name_of(document: Document) -> str:
    """What stands before a document's text."""
    return f"Document: {document.name}\n\n"


def body_of(document: Document) -> str:
    """A document's text as the model is told it."""
    return document.text.strip()


def asked_of(documents: Sequence[Document], question: str) -> str:
    """How it ends: a question about documents that were read before."""
    it = "the document" if len(documents) == 1 else "the documents"
    return f"Based on {it} above, answer this question: {question.strip()}"


def certain(encoded: Callable[[str], list[int]], text: str) -> list[int]:
    """The tokens that a text begins with however it goes on.

    Args:
        encoded: tokens of a whole text.
    """
    ids = encoded(text)
    for ending in (" a", "\n\na", ".", "a"):
        pairs = zip(ids, encoded(text + ending), strict=False)
        ids = ids[: next((at for at, (one, other) in enumerate(pairs) if one != other), len(ids))]
    return ids


def goes_on(ids: list[int], ahead: list[int]) -> bool:
    """Whether tokens begin with those that were read ahead, and are more."""
    return len(ids) > len(ahead) and ids[: len(ahead)] == ahead


def said_tokens(
    tokenizer: Any, text: str, *, opening: bool, first: bool, system: str = ""
) -> list[int]:
    """The tokens of a user's message, in the tokenizer's chat template if it has one.

    Args:
        opening: it is the first message.
        first: nothing at all was read before.
        system: what the model is told before the first message.
    """
    parts = said_parts(tokenizer, text, opening=opening, first=first, system=system)
    return _joined(tokenizer, parts)


def said_parts(
    tokenizer: Any, text: str, *, opening: bool, first: bool, system: str = ""
) -> list[Part]:
    """What is encoded one after the other to get `said_tokens`, whose args these are."""
    if tokenizer.chat_template is not None:
        return _turn_parts(tokenizer, whole_characters(text), opening=opening, system=system)
    told = f"{system}\n\n" if system and opening else ""
    return [_text_part(told + text, first=first)]


def text_tokens(tokenizer: Any, text: str, *, first: bool) -> list[int]:
    """The tokens of a text as it is, with those that go before the `first` one."""
    return _text_part(text, first=first).tokens(tokenizer)


def _text_part(text: str, *, first: bool) -> Part:
    return Part(whole_characters(text), {"add_special_tokens": first})


def token_list(token_ids: Any) -> list[int]:
    """Token ids as a list.

    Raises:
        SettingError: they are something else.
    """
    ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    if isinstance(ids, list | tuple) and all(isinstance(token, int) for token in ids):
        return list(ids)
    raise SettingError(
        f"{type(token_ids).__name__} is not a list of token ids: encode text with "
        "runner.tokenizer.encode, or say it with stream"
    )


def user_turn(tokenizer: Any, text: str, *, opening: bool, system: str = "") -> list[int]:
    """The tokens that a user's message adds to a conversation in the tokenizer's chat template:
    the message with all that stands before it if it is the `opening`, else all that follows the
    last answer.

    Args:
        system: what the model is told before, if not what its template says.

    What looks like a control token in the message is encoded as the characters it is made of, so
    that a document cannot end the user's turn.
    """
    return _joined(tokenizer, _turn_parts(tokenizer, text, opening=opening, system=system))


def _turn_parts(tokenizer: Any, text: str, *, opening: bool, system: str) -> list[Part]:
    as_is = {"add_special_tokens": False}
    controls = [str(token) for token in tokenizer.all_special_tokens]
    if not any(token in text for token in controls):
        return [Part(_turn(tokenizer, text, opening=opening, system=system), as_is)]
    turn = _turn(tokenizer, _TEXT, opening=opening, system=system)
    before, _, after = turn.partition(_TEXT)
    plain = Part(text.strip(), {**as_is, "split_special_tokens": True})
    return [Part(before, as_is), plain, Part(after, as_is)]


def _joined(tokenizer: Any, parts: Sequence[Part]) -> list[int]:
    return [token for part in parts for token in part.tokens(tokenizer)]


def _turn(tokenizer: Any, text: str, *, opening: bool, system: str) -> str:
    """Later turns are cut out of a conversation with a stand-in for the past. The real past is in
    the cache as it was said; templates that trim or drop parts of it have no say."""
    message = {"role": "user", "content": text}
    if opening and system:
        return _told(tokenizer, system, message)
    alone = _rendered(tokenizer, [message])
    if opening:
        return alone
    past = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    # A template that shows no past is given the message alone.
    return _rendered(tokenizer, [*past, message]).partition(_ANSWER)[2] or alone


def _told(tokenizer: Any, system: str, message: dict[str, str]) -> str:
    """A first message after a system message; in front of its text, if the template has none."""
    from jinja2 import TemplateError

    try:
        shown = _rendered(tokenizer, [{"role": "system", "content": system}, message])
    except TemplateError:
        shown = ""
    if system.strip() in shown:
        return shown
    return _rendered(tokenizer, [message | {"content": f"{system}\n\n{message['content']}"}])


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def tokens_of(tokenizer: Any, text: str) -> int:
    """How many tokens a text has, without what a template adds."""
    return len(tokenizer.encode(whole_characters(text)))
