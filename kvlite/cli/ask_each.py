"""Several questions on one command line: which words they are, and their answers together."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvlite.cli import BAD_INPUT, INTERRUPTED
from kvlite.cli.console import print_json, write
from kvlite.cli.screen import answer_json, print_account, reading, sources_json
from kvlite.cli.word_wrap import word_wrapped
from kvlite.config.resolve import Resolved
from kvlite.conversation.message import thought_for
from kvlite.documents.names import is_written_like_a_file, may_be_file
from kvlite.errors import KvliteError, SettingError, sentence
from kvlite.model.chat_template import asked_of, question_about

if TYPE_CHECKING:
    from kvlite.conversation.conversation import Conversation
    from kvlite.conversation.endings import FinishReason
    from kvlite.conversation.metrics import Piece

USAGE = 'give a file and a question: kvlite ask report.pdf "What is it about?"'


def sorted_out(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files, which come first, and the questions; none if these come one after another.

    A word that names a file is one. What may be a misspelt name is never taken for a question, but
    for a last word that is not written like a file's name. Raises SettingError if there is no file,
    a question is empty, or it may be a file's name."""
    there = [at for at, word in enumerate(words) if word.strip() == "-" or os.path.isfile(word)]
    count = there[-1] + 1 if there else min(1, len(words))
    while count < len(words) - 1 and may_be_file(words[count]):
        count += 1  # whoever opens it says that it is not there
    files, questions = [*words[:count]], [word.strip() for word in words[count:]]
    for at, word in enumerate(questions, count):
        if not word:
            raise SettingError(f"the question {words[at]!r} is empty: {USAGE}")
        if is_written_like_a_file(word) or (at < len(words) - 1 and may_be_file(word)):
            raise SettingError(
                f"there is no file {word}: name files before questions, and end a question that "
                "looks like a name with a question mark"
            )
    if not files:
        raise SettingError(USAGE)
    if "-" in files and not questions:
        raise SettingError(
            f"standard input is the document, so no question can come from it: {USAGE}"
        )
    return files, questions


def said_about(talk: "Conversation", asked: str) -> str:
    """A question as the model reads it: with the documents, the first time."""
    if not talk.documents:
        return asked
    return (asked_of if talk.messages else question_about)(talk.documents, asked)


@dataclass(frozen=True)
class Printing:
    """How answers are printed, by which settings, and whether all `sources` of them are."""

    screen: Console
    resolved: Resolved
    as_json: bool
    sources: bool


@dataclass
class _Answer:
    question: str
    text: str = ""
    reasoning: str = ""
    last: "Piece | None" = None
    error: str = ""

    @property
    def reason(self) -> "FinishReason | None":
        return None if self.last is None else self.last.finish_reason

    @property
    def ended(self) -> bool:
        return bool(self.error) or self.reason is not None

    def print(self, number: int, how: Printing) -> None:
        _write(f"{number}. {self.question}")
        if self.error:
            how.screen.print(f"kvlite: {self.error}")
        elif self.last is not None:
            if self.reasoning:
                thought = thought_for(self.last.reasoning_tokens)
                how.screen.print(thought, style="dim")
            _write(self.text)
            print_account(self.last, how.screen, sources=how.sources)

    def to_json(self) -> dict[str, Any]:
        made: dict[str, Any] = {"question": self.question}
        if self.last is not None:
            metrics = self.last.metrics.to_json()
            said = answer_json(self.text, self.reasoning)
            made |= {**said, **sources_json(self.last), **metrics}
        return made | ({"error": self.error} if self.error else {})


def answer_each(talk: "Conversation", questions: Sequence[str], how: Printing) -> int:
    """Answer questions together, and print the answers in their order, each once those before it
    have ended. Ctrl-C ends them where they stand. Returns the exit code."""
    answers, printed = [_Answer(each) for each in questions], 0
    status = how.screen.status("Answering")

    def show() -> None:
        nonlocal printed
        while not how.as_json and printed < len(answers) and answers[printed].ended:
            status.stop()
            answers[printed].print(printed + 1, how)
            printed += 1
        made = sum(each.last.metrics.generated_tokens for each in answers if each.last is not None)
        ended, count = sum(each.ended for each in answers), len(answers)
        status.update(f"Answering: {ended} of {count} done, {made:,} tokens")

    with reading(how.screen) as (bar, callbacks):
        said = [said_about(talk, question) for question in questions]
        try:
            for index, heard in talk.ask_each(said, callbacks=callbacks):
                answer = answers[index]
                if isinstance(heard, KvliteError):
                    answer.error = sentence(how.resolved.noted(heard))
                else:
                    bar.close()
                    status.start()
                    answer.text, answer.last = answer.text + heard.text, heard
                    answer.reasoning += heard.reasoning
                show()
        finally:
            status.stop()
        code = _code(answers)
        for answer in answers:
            if not answer.ended:
                answer.error = "stopped before it was answered"
        if how.as_json:
            print_json([each.to_json() for each in answers], readable=True)
        show()
    return code


def _code(answers: Sequence[_Answer]) -> int:
    if any(not each.ended or each.reason == "interrupted" for each in answers):
        return INTERRUPTED
    wrong = any(each.error or (each.last and each.last.metrics.failure) for each in answers)
    return BAD_INPUT if wrong else 0


def _write(text: str) -> None:
    write(f"{word_wrapped(text) if sys.stdout.isatty() else text}\n")
