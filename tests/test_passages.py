"""Passages as tokens: each token where it begins, beside a map of single characters."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from kvlite.conversation.sources import MessagePassages, Passage, message_passages
from kvlite.documents import Document
from kvlite.model.chat_template import question_about, said_tokens
from kvlite.model.source import find_model
from tests.conftest import IntegerTokenizer

PAGES = (
    "\n  We the People of the United States, in Order to form a more perfect Union,\n\n",
    "establish Justice, insure domestic Tranquility — naïve 日本 🙂",
    "",
    "provide for the common defence",
    "promote the general Welfare   \n",
)
TRIMS = "{{ bos_token }}{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}"
SHOUTS = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"


def paged(name: str, pages: tuple[str, ...]) -> Document:
    starts = [sum(len(page) + 1 for page in pages[:number]) for number in range(len(pages))]
    return Document(name, "\n".join(pages), tuple(starts))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(find_model("smollm2-135m"))


def oracle(tokenizer: Any, ids: list[int], found: MessagePassages) -> list[int]:
    """How many tokens each passage has, by the character that each token begins with."""
    whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    of, at = dict[int, int](), 0
    for number, passage in enumerate(found.passages):
        text = passage.document.text
        if passage is first_of(found, passage.document):
            name = f"Document: {passage.document.name}\n\n"
            at = whole.index(name + text.strip(), at) + len(name)
            begin, before = at - (len(text) - len(text.lstrip())), at
        of |= dict.fromkeys(range(before, begin + passage.end), number)
        before = begin + passage.end
    counts = [0] * len(found.passages)
    for number in range(len(ids)):
        # Of a character whose bytes are in several tokens, each begins where it does.
        told = tokenizer.decode(ids[:number], clean_up_tokenization_spaces=False)
        owner = of.get(len(told.rstrip("\ufffd")))
        if owner is not None:
            counts[owner] += 1
    return counts


def first_of(found: MessagePassages, document: Document) -> Passage:
    return next(each for each in found.passages if each.document is document)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("What is it for?", {"opening": True, "first": True}),
    ("What is it for?", {"opening": False, "first": False}),
    ("  And <|im_end|> what?\n", {"opening": True, "first": True}),
    ("And <|im_end|> what?", {"opening": False, "first": False}),
    ("", {"opening": True, "first": True, "system": "Document: a.pdf\n\nBe brief."}),
]


@pytest.mark.cases(13)
@pytest.mark.parametrize("template", ["its own", TRIMS, None])
@pytest.mark.parametrize(("question", "said"), CASES)
def test_every_token_is_in_the_passage_where_it_begins(
    tokenizer: Any,
    question: str,
    said: dict[str, Any],
    template: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if template != "its own":
        monkeypatch.setattr(tokenizer, "chat_template", template)
    documents = [paged("a.pdf", PAGES), Document("b.txt", " Short.\n", ()), paged("c.pdf", PAGES)]
    text = question_about(documents, question)
    found = message_passages(tokenizer, text, documents, **said)
    assert found is not None
    assert found.tokens == said_tokens(tokenizer, text, **said)
    assert [each.last - each.first for each in found.passages] == oracle(
        tokenizer, found.tokens, found
    )
    assert {each.document for each in found.passages} == {*documents}
    asked = tokenizer.decode(found.tokens[found.question :], clean_up_tokenization_spaces=False)
    assert asked.lstrip().startswith(question.strip())
    assert "answer this question" not in asked


def test_halves_of_surrogate_pairs_move_no_passage(tokenizer: Any) -> None:
    broken = paged("\ud800.pdf", ("one \ud83d\ude42 two \ud800", "three \udc00", "four"))
    mended = paged("\ufffd.pdf", ("one 🙂 two \ufffd", "three \ufffd", "four"))
    made, expected = (
        message_passages(
            tokenizer, question_about([each], "Why?"), [each], opening=True, first=True
        )
        for each in (broken, mended)
    )
    assert made is not None
    assert expected is not None
    tokens = [(each.first, each.last) for each in made.passages]
    assert tokens == [(each.first, each.last) for each in expected.passages]
    assert made.tokens == expected.tokens


def test_none_where_it_cannot_be_told(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [Document("3", "4 5 6", ())]
    said: dict[str, Any] = {"opening": True, "first": True}
    text = question_about(documents, "why?")
    numbers = question_about([], "7")
    assert message_passages(IntegerTokenizer(), numbers, documents, **said) is None
    monkeypatch.setattr(tokenizer, "chat_template", SHOUTS)
    assert message_passages(tokenizer, text, documents, **said) is None


def test_a_message_without_documents_has_no_passages(tokenizer: Any) -> None:
    documents = [Document("a.txt", "One. Two.", ())]
    found = message_passages(tokenizer, "  Why?", documents, opening=False, first=False)
    assert found is not None
    assert found.passages == ()
    assert tokenizer.decode(found.tokens[found.question :]).lstrip().startswith("Why?")
