"""Where answers come from: attention paid to passages is transformers', and the passage that holds
a fact comes first, on the embedded model."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import kvlite
from kvlite.bench.prose import bundled_prose, hidden_in
from kvlite.cache.query_log import ROWS, QueryLog
from kvlite.config.settings import Settings
from kvlite.conversation import sources
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.metrics import Piece
from kvlite.conversation.sources import LEAST, MOST, spans
from kvlite.documents import Document
from kvlite.engine.passage_attention import passage_attention
from kvlite.engine.speculate import Pace
from kvlite.model.chat_template import all_of, question_about
from tests.conftest import make_tiny

PASSAGES = 7


def paid(attentions: Any, layer: int, owner: torch.Tensor, tokens: range) -> torch.Tensor:
    """The most attention that tokens paid to passages, `(heads, passages)`, by transformers."""
    rows = attentions[layer][0][:, tokens.start : tokens.stop]
    sums = [rows[:, :, owner == passage].sum(-1).amax(1) for passage in range(PASSAGES)]
    return torch.stack(sums, 1)


CASES: list[tuple[str, dict[str, Any], int]] = [
    ("llama", {}, 30),
    ("llama", {"speculate": "auto"}, ROWS + 40),  # the log is too short for the first ones
    ("gemma2", {}, 60),
    ("gpt-oss", {}, 60),
    ("qwen3-next", {}, 40),
    ("gemma4-e", {}, 60),
]


@pytest.mark.cases(3)
@pytest.mark.parametrize(("name", "settings", "length"), CASES)
def test_attention_to_passages_is_transformers(
    name: str, settings: dict[str, Any], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tokens read and of those generated, one by one and several at once."""
    monkeypatch.setattr(Pace, "factor", 0.0)
    tiny = make_tiny(name)
    talk = Conversation(tiny.model, Settings(method="full", **settings))
    logs = talk.cache.queries = {index: QueryLog() for index in tiny.model.shape.full_layers}
    torch.manual_seed(1)
    prompt = torch.randint(3, 199, (length // 2,)).tolist() * 2  # so that tokens are proposed
    answer = talk.generate(prompt, max_new_tokens=12, ignore_eos=True)
    assert answer.metrics.proposed_tokens or length < ROWS
    seen = talk.cache.seen
    with torch.no_grad():
        ids = torch.tensor([talk.token_ids])
        attentions = tiny.reference(ids, output_attentions=True).attentions
    owner = torch.arange(seen) // 5 % (PASSAGES + 1)
    layers = [index for index, each in enumerate(attentions) if each is not None]
    own = dict(zip(range(tiny.model.shape.layers), layers, strict=False))
    for index, log in logs.items():
        layer = talk.cache.layers[index]
        for tokens in (range(length - 9, length + 2), range(length, seen), range(seen)):
            found = passage_attention(layer, log, tokens, owner, PASSAGES)
            known = range(max(tokens.start, seen - ROWS), tokens.stop)
            expected = paid(attentions, own[index], owner, known)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        forgotten = range(max(0, seen - ROWS))  # as all of a question behind a long answer
        found = passage_attention(layer, log, forgotten, owner, PASSAGES)
        assert found.shape[1] == PASSAGES and not found.any()


TEXTS = [
    "One. Two.",
    "A heading\n\nA sentence that is not very short, since it goes on. Another one goes on.",
    "x" * 1000 + "\n\n" + "a b. " * 100,
    "| a | b |\n" * 200,
    "\u6211\u5011\u3002" * 90,
    "  \n\n ",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_passages_have_all_of_a_text_once(text: str) -> None:
    found = [*spans(text)]
    kept = "".join(text[start:end] for start, end in found)
    assert "".join(kept.split()) == "".join(text.split())
    assert all(first[1] <= second[0] for first, second in pairwise(found))
    assert all(0 < end - start <= MOST + LEAST for start, end in found)
    assert all(text[start:end] == text[start:end].strip() for start, end in found)


def test_passages_end_with_words_and_paragraphs() -> None:
    text = "river stone bridge lamp " * 100
    found = {word for start, end in spans(text) for word in text[start:end].split()}
    assert found == {*text.split()}
    text = "Heading\n\nFirst, that is short.\n\nSecond."
    assert [text[start:end] for start, end in spans(text)] == [text[:30], "Second."]


PARAGRAPHS = (
    "The river Aun rises in the hills of Morrow and reaches the sea at Port Ellis.",
    "The orchestra rehearses on Thursdays in the old tannery. Tickets cost four crowns each.",
    "The bridge over the Nerin may not be used by carts that are heavier than six tons.",
    "Visitors to the salt mine must leave their cameras with the foreman at the upper gate.",
)


def paged() -> Document:
    starts = [sum(len(each) + 2 for each in PARAGRAPHS[:number]) for number in range(4)]
    return Document("a.pdf", "\n\n".join(PARAGRAPHS), tuple(starts))


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "full", "recall": "off"},
        {"budget": "80", "kv_bits": "4"},
        {"method": "h2o", "budget": "60", "recall": "off"},
    ],
)
def test_the_last_piece_has_the_passage(smollm: kvlite.Runner, settings: dict[str, Any]) -> None:
    talk, document = smollm.conversation(max_new_tokens=6, **settings), paged()
    talk.documents = (document,)
    *others, last = talk.stream(question_about([document], "How heavy may carts on the bridge be?"))
    assert not any(piece.sources for piece in others)
    first = last.sources[0]
    assert (first.document, first.page, first.where) == (document, 3, "page 3")
    assert first.text == PARAGRAPHS[2] == document.text[first.start : first.end]
    assert len(last.sources) <= 3
    (*_, again) = talk.stream("And where do visitors to the salt mine leave their cameras?")
    assert PARAGRAPHS[3] in [each.text for each in again.sources]
    talk.documents = ()
    assert not any(piece.sources for piece in talk.stream("Why?"))


def test_what_finds_them_is_planned(smollm: kvlite.Runner) -> None:
    """Logs of queries take as much memory as the cache of a short text."""
    talk, document = smollm.conversation(max_new_tokens=2, measure="tensors"), paged()
    for documents in ((document,), ()):
        talk.documents = documents
        (*_, last) = talk.stream(question_about([document], "How heavy may carts be?"))
        assert last.metrics.plan_error == pytest.approx(0, abs=1e-3)


@pytest.mark.long
def test_where_nothing_stands_out_nothing_is_cited(smollm: kvlite.Runner) -> None:
    """Of an answer that the text has the right passage, of others none: the same filler came."""
    prose = bundled_prose()
    document = Document("a.txt", prose[: len(prose) // 4], ())
    talk = smollm.conversation(max_new_tokens=16)
    talk.documents = (document,)
    found = []
    for asked in ("What is the capital of Mongolia?", "How many moons does Jupiter have?", REVENUE):
        *_, last = talk.stream(question_about([document], asked))
        found.append([each.text for each in last.sources])
        talk.undo()
    mongolia, moons, revenue = found
    assert not mongolia and not moons
    assert "All Bills for raising Revenue shall originate" in revenue[0]


REVENUE = "Where must bills for raising revenue originate?"


QUESTION = "How heavy may carts on the bridge be?"


@pytest.mark.parametrize(
    "reason",
    ["does not show where they are", "not in the cache as it was", "no memory left to find"],
)
def test_sources_that_cannot_be_told_are_missed_aloud(
    smollm: kvlite.Runner, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    found = sources.message_passages

    def elsewhere(*args: Any, **said: Any) -> Any:
        made = found(*args, **said)
        if made is None or "show" in reason:
            return None
        return replace(made, tokens=made.tokens[::-1])

    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("made up by a test")

    talk, document = smollm.conversation(max_new_tokens=2), paged()
    talk.documents = (document,)
    if "memory" in reason:
        monkeypatch.setattr(sources, "passage_attention", full)
    else:
        monkeypatch.setattr(sources, "message_passages", elsewhere)
    (*_, last) = talk.stream(question_about([document], QUESTION))
    assert not last.sources and reason in last.metrics.notes[-1]
    assert "passages that the answer came from" in last.metrics.notes[-1]


# The measure was tuned on another text; variants of it were compared on this one, too.
_LINES = """\
The lighthouse at Corran Point was painted green in 1931, unlike the church.
Which colour was the lighthouse at Corran Point painted?
Visitors to the salt mine must leave their cameras with the foreman at the upper gate.
Where must visitors to the salt mine leave their cameras?
The orchestra of Velm rehearses on Thursdays in the old tannery behind the fish market.
On which day does the orchestra of Velm rehearse?
Captain Ines Laborde crossed the strait by rowing boat in fourteen hours.
How long did Captain Laborde need to cross the strait?
The bridge over the Nerin may not be used by carts heavier than six tons.
How heavy may carts on the bridge over the Nerin be?
The vaccine has to be kept between two and eight degrees and be used within five weeks.
At which temperature does the vaccine have to be kept?
Old Tobias left his workshop to the apprentices, and his violin to the mayor's daughter.
To whom did Tobias leave his violin?
The invoice number of the printing press is KX-20417, and it was paid in April.
What is the invoice number of the printing press?
Frost destroyed the vineyard, so the monks planted apple trees instead.
What did the monks plant after frost destroyed the vineyard?
The new library was designed by Hanna Weissfeld, who had drawn nothing but barns before.
Who designed the new library?
The swimming pool is closed from November to the middle of March for repairs.
When is the swimming pool closed?
The dog of the station master is called Bruno and answers to three languages.
What is the name of the station master's dog?
""".splitlines()
HELD_BACK = [*zip(_LINES[::2], _LINES[1::2], strict=True)]


@pytest.mark.long
def test_the_passage_that_holds_a_fact_comes_first(smollm: kvlite.Runner) -> None:
    """Twelve facts in some 2,000 tokens, with the default settings, asked together; most answers
    are wrong, which is no matter: it is said where the model looked."""
    prose = bundled_prose()
    places = [(0.5 + 5 * number % 12) / 12 for number in range(12)]
    text = hidden_in(
        prose[5 * len(prose) // 6 :],
        [(place, fact) for place, (fact, _) in zip(places, HELD_BACK, strict=True)],
    )
    talk, document = smollm.conversation(max_new_tokens=16), Document("a.txt", text, ())
    talk.documents = (document,)
    assert talk.read_ahead(all_of([document]))
    assert len(talk.token_ids) > 2000
    questions = [question_about([document], asked) for _, asked in HELD_BACK]
    found = {index: piece for index, piece in talk.ask_each(questions) if isinstance(piece, Piece)}
    first = [found[index].sources[0].text for index in range(12)]
    right = sum(fact in text for text, (fact, _) in zip(first, HELD_BACK, strict=True))
    assert right >= 11
