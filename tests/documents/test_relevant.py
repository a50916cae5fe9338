"""Of documents that are too long, the passages that a text search finds for a question."""

import re
from dataclasses import asdict

from kvlite.conversation.sources import Source
from kvlite.documents import Document
from kvlite.documents.relevant import relevant

FILLER = "Nothing of this kind is said about anybody here.\n" * 400
FACTS = ("The lighthouse of Karsk was built by Ada Brandt.", "Karsk has a grey donkey.")
WHOLE = f"{FILLER}\n{FACTS[0]}\n\n{FILLER}\n{FACTS[1]}\n\n{FILLER}"


def words(text: str) -> int:
    return len(text.split())


def test_what_is_asked_about_stays_in_order_with_its_place_in_the_whole() -> None:
    document = Document("a.txt", WHOLE, (), assumed=("read as cp850",))
    (found,) = relevant(
        [document], "Who built the lighthouse, and what donkey is there?", 900, words
    )
    assert words(found.text) <= 900 and found.text.count("left out here]") == 3
    for fact, line in zip(FACTS, (402, 805), strict=True):
        at, whole = found.text.index(fact), WHOLE.index(fact)
        assert 1 + WHOLE.count("\n", 0, whole) == line
        assert Source(found, at, at + 9).where == f"line {line}"
    assert found.text.index(FACTS[0]) < found.text.index(FACTS[1])
    number, count = (int(each) for each in re.findall(r"\d+", found.note)[-2:])
    assert 2 <= number < 12 and count > 40
    assert found.note == (
        f"a.txt: read as cp850; read {number} of {count} passages, those that a text search found "
        "for this question"
    )
    assert Document.from_plain(asdict(found)) == found


def test_pages_are_those_of_the_whole_and_what_fits_stays_whole() -> None:
    pages = Document("a.pdf", WHOLE, (0, WHOLE.index(FACTS[1])), page_labels=("i", "ii"))
    short = Document("b.txt", "A donkey.", ())
    found, other = relevant([pages, short], "donkey", 300, words)
    at = found.text.index(FACTS[1])
    assert Source(found, at, at + 9).where == "page ii" and other == short
    assert relevant([short], "Nothing that it says", 300, words) == [short]
    assert not relevant([pages], "donkey", 10, words)[0].excerpt


def test_words_of_other_languages_are_found() -> None:
    text = (
        "\u5929\u6c23\u5f88\u597d\u3002" * 400
        + "\n\n\u71c8\u5854\u5f88\u9ad8\u3002\n\n"
        + "Die \u00c4pfel. " * 400
    )
    document = Document("a.txt", text, ())
    (found,) = relevant([document], "\u71c8\u5854?", 2000, len)
    assert "\u71c8\u5854" in found.text and found.excerpt
    (found,) = relevant([document], "\u00e4pfel?", 2000, len)
    assert "\u00c4pfel" in found.text and "\u71c8\u5854" not in found.text
