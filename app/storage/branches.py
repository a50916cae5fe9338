"""Names that tell the branches of a conversation apart, and what was said on the others."""

from collections import Counter
from collections.abc import Sequence

from kvlite.conversation.session import Session

from .record import Branch, first_words, said_in


def branches_of(session: Session) -> tuple[list[Branch], list[str]]:
    """All branches of a conversation, and what was said, and which documents were read, on those
    that are not the current one and not on it, each once."""
    branches = session.talk.branches
    said = [said_in(session, each.messages) for each in branches]
    questions, answers = [], []
    for messages in said:
        asked = [each.text for each in messages if each.role == "user"]
        questions.append(asked[-1] if asked else "the beginning")
        last = messages[-1] if messages else None
        answers.append(last.text if last is not None and last.role == "assistant" else "")
    titles = told_apart(questions, answers)
    found = [Branch(title, each.current) for title, each in zip(titles, branches, strict=True)]
    here, others = set[str](), dict[str, None]()
    for each, messages in zip(branches, said, strict=True):
        texts = [text for one in messages for text in (one.text, *one.documents)]
        others |= dict.fromkeys(texts)
        if each.current:
            here.update(texts)
    return found, [text for text in others if text not in here]


def told_apart(questions: Sequence[str], answers: Sequence[str]) -> list[str]:
    """Titles of branches: the last question; with its answer if others end in the same question;
    with a number if others have both.

    Args:
        answers: to the questions; "" where there is none.
    """
    titles = [first_words(each) for each in questions]
    counts = Counter(titles)
    titles = [
        f"{title} → {first_words(answer)}" if answer and counts[title] > 1 else title
        for title, answer in zip(titles, answers, strict=True)
    ]
    counts, before = Counter(titles), Counter[str]()
    for number, title in enumerate(titles):
        before[title] += 1
        if counts[title] > 1:
            titles[number] = f"{before[title]}. {title}"
    return titles
