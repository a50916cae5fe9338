"""The ways a conversation went, and what tells them apart."""

from collections import Counter
from collections.abc import Sequence

from kvlite.conversation.session import Session

from .record import Branch, first_words, said_in


def branches_of(session: Session) -> list[Branch]:
    """Those of a conversation."""
    found = list(session.talk.branches)
    said = [[each.text for each in session.typed(way.messages)] for way in found]
    last = [texts[-1] if texts else "the beginning" for texts in said]
    answers = [_answer(way.messages) for way in found]
    titles = told_apart(last, answers)
    return [Branch(title, way.current) for title, way in zip(titles, found, strict=True)]


def said_elsewhere(session: Session) -> list[str]:
    """What was said on other ways than the current one, and not on it, and names of documents: each
    once."""
    ways = session.talk.branches
    texts = [
        [
            text
            for each in said_in(way.messages, session.typed(way.messages))
            for text in (each.text, *each.documents)
        ]
        for way in ways
    ]
    here = {each for own, way in zip(texts, ways, strict=True) if way.current for each in own}
    others = dict.fromkeys(each for own in texts for each in own)
    return [each for each in others if each not in here]


def told_apart(questions: Sequence[str], answers: Sequence[str]) -> list[str]:
    """What to call ways: by the question that was asked last; by its answer too, if others have
    that question; by a number, if others have both.

    Args:
        answers: to the questions, "" where there is none.
    """
    titles = [first_words(each) for each in questions]
    some = Counter(titles)
    titles = [
        f"{title} → {first_words(answer)}" if answer and some[title] > 1 else title
        for title, answer in zip(titles, answers, strict=True)
    ]
    some, before = Counter(titles), Counter[str]()
    for number, title in enumerate(titles):
        before[title] += 1
        if some[title] > 1:
            titles[number] = f"{before[title]}. {title}"
    return titles


def _answer(messages: Sequence[dict[str, str]]) -> str:
    last = messages[-1] if messages else {"role": "user"}
    return last["content"] if last["role"] == "assistant" else ""
