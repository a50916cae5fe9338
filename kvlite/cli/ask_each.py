"""Several questions on one command line: which words they are, and their answers together."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvlite.cli import BAD_INPUT, INTERRUPTED
from kvlite.cli.console import print_json, write
from kvlite.cli.screen import print_account, reading, sources_json
from kvlite.cli.word_wrap import word_wrapped
from kvlite.config.resolve import Resolved
from kvlite.documents.names import is_written_like_a_file, may_be_file
from kvlite.errors import KvliteError, SettingError, sentence
from kvlite.model.chat_template import asked_of, question_about

if TYPE_CHECKING:
    from kvlite.conversation.conversation import Conversation
    from kvlite.conversation.metrics import FinishReason, Piece

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


def answer_each(talk: "Conversation", questions: Sequence[str], how: Printing) -> int:
    """Answer questions together, and print the answers in their order, each once those before it
    have ended. Ctrl-C ends them where they stand. Returns the exit code."""
    shown = _Shown(questions, how)
    with reading(how.screen) as (bar, callbacks):
        said = [said_about(talk, question) for question in questions]
        try:
            for index, heard in talk.ask_each(said, callbacks=callbacks):
                if isinstance(heard, KvliteError):
                    shown.failed(index, heard)
                    continue
                bar.close()
                shown.add(index, heard)
        finally:
            shown.status.stop()
        shown.end()
    return shown.code


class _Shown:
    """Answers as they are printed.

    Attributes:
        texts, pieces, errors: by question; of an answer, what has come so far, and its last piece.
        next: the first question that is not printed.
        status: how far all of it is.
        code: the exit code.
    """

    def __init__(self, questions: Sequence[str], how: Printing) -> None:
        self.questions, self.how = questions, how
        self.texts = [""] * len(questions)
        self.pieces: list[Piece | None] = [None] * len(questions)
        self.errors: dict[int, str] = {}
        self.next = self.code = 0
        self.status = how.screen.status("Answering")

    def add(self, index: int, piece: "Piece") -> None:
        """Take a piece of an answer."""
        self.status.start()
        self.texts[index] += piece.text
        self.pieces[index] = piece
        self.show()

    def failed(self, index: int, error: KvliteError) -> None:
        """There is no answer to a question."""
        self.errors[index] = sentence(self.how.resolved.noted(error))
        self.code = self.code or BAD_INPUT
        self.show()

    def show(self) -> None:
        """Print what can be printed, and how far all of it is."""
        while not self.how.as_json and self.next < len(self.questions) and self._ended(self.next):
            self.status.stop()
            self._print(self.next)
            self.next += 1
        made = sum(each.metrics.generated_tokens for each in self.pieces if each is not None)
        ended, count = sum(map(self._ended, range(len(self.questions)))), len(self.questions)
        self.status.update(f"Answering: {ended} of {count} done, {made:,} tokens")

    def _ended(self, index: int) -> bool:
        return index in self.errors or self._reason(index) is not None

    def _reason(self, index: int) -> "FinishReason | None":
        piece = self.pieces[index]
        return None if piece is None else piece.metrics.finish_reason

    def _print(self, index: int) -> None:
        self._write(f"{index + 1}. {self.questions[index]}")
        if index in self.errors:
            self.how.screen.print(f"kvlite: {self.errors[index]}")
            return
        piece = self.pieces[index]
        assert piece is not None
        self._write(self.texts[index])
        print_account(piece, self.how.screen, sources=self.how.sources)

    def _write(self, text: str) -> None:
        write(f"{word_wrapped(text) if sys.stdout.isatty() else text}\n")

    def end(self) -> None:
        """Print the rest: no more comes."""
        reasons = [*map(self._reason, range(len(self.questions)))]
        none = [at for at, each in enumerate(reasons) if each is None and at not in self.errors]
        if none or "interrupted" in reasons:
            self.code = INTERRUPTED
        elif any(each is not None and each.metrics.failure for each in self.pieces):
            self.code = BAD_INPUT
        for index in none:
            self.errors[index] = "stopped before it was answered"
        if self.how.as_json:
            print_json([self._json(index) for index in range(len(reasons))], readable=True)
        self.show()

    def _json(self, index: int) -> dict[str, Any]:
        made: dict[str, Any] = {"question": self.questions[index]}
        piece = self.pieces[index]
        if piece is not None:
            made |= {"answer": self.texts[index], **sources_json(piece), **piece.metrics.to_json()}
        if index in self.errors:
            made["error"] = self.errors[index]
        return made
