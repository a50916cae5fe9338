"""What was said with one model, for another to read: messages in its own chat template, answers as
they were given, documents with their messages.

All branches stay. How the former model reasoned is still shown, but not read again.
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Self

from kvlite.config.settings import Settings
from kvlite.conversation.branch import Branch, Node
from kvlite.conversation.checkpoint import Checkpoint
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.history_file import history_from
from kvlite.conversation.message import as_typed
from kvlite.conversation.runner import Runner
from kvlite.conversation.snapshot import Snapshot, read_again
from kvlite.documents import Document
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks
from kvlite.errors import ContextError, SettingError, SnapshotError
from kvlite.model.answers.form import AnswerForm
from kvlite.model.answers.thinking import opens_reasoning, thinking_variables
from kvlite.model.chat_template import all_of, said_tokens, text_tokens
from kvlite.model.load import LoadedModel
from kvlite.model.text_limit import tokenized

# Seconds of reading that tell how fast a model reads, and the tokens it is first tried with.
_TELLING, _FIRST = 0.5, 32


@dataclass(frozen=True)
class Price:
    """What reading a conversation again takes: so many `tokens`, and about so many `seconds`."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class Reader:
    """A model that is to read a conversation: what its tokens depend on."""

    tokenizer: Any
    form: AnswerForm
    max_context: int

    @classmethod
    def of(cls, model: LoadedModel) -> Self:
        """A loaded one."""
        return cls(model.tokenizer, model.answer_form, model.shape.max_context)


@dataclass(frozen=True)
class Retold:
    """A conversation in the tokens of a model that has not read it yet.

    Attributes:
        branches: with their tokens; `current` is the index of the one to go on with.
        waiting: documents of no message yet.
        waiting_ids: about what these come to.
    """

    branches: list[Branch]
    current: int
    documents: tuple[Document, ...]
    waiting: list[Document]
    waiting_ids: list[int]

    @property
    def token_ids(self) -> list[int]:
        """All that is read again."""
        return [*self.branches[self.current].token_ids, *self.waiting_ids]

    def read(self, talk: Conversation, callbacks: Callbacks) -> None:
        """Let a new conversation go on from here. After an error, do not use it. Raises OutOfMemory
        and Stopped, as reading does."""
        branch = self.branches[self.current]
        assert branch.end is not None
        empty, pending = talk.model.empty_cache(), branch.end.pending_ids
        talk.context.resume(empty, None, branch.token_ids, pending, (), [])
        read_again(talk, branch.prefill_boundaries, callbacks)
        branch.token_ids, branch.end = [], None
        talk.documents = self.documents
        talk.history.resume(self.branches, self.current)
        if self.waiting:
            talk.read_ahead(all_of(self.waiting), callbacks=callbacks)


def read_with(
    runner: Runner, path: Path, reading: Callbacks = NO_CALLBACKS, **settings: Any
) -> Conversation:
    """Go on with a conversation that was saved with another model than the runner's: all that was
    said is read again. Args are those of `Runner.open`.

    Raises:
        ContextError: there is more than the model was trained for.
        SnapshotError: the file is damaged, or some of it is known to the other model alone.
        OutOfMemory, SettingError, Stopped: as for `Runner.open`.
    """
    with Snapshot(path) as saved:
        talk = _begun(runner, saved, settings, reading)
        reader = Reader.of(talk.model)
        _retold(reader, talk.settings, saved, reading.cancel).read(talk, reading)
        return talk


def price_of(runner: Runner, path: Path, cancel: Event | None = None, **settings: Any) -> Price:
    """What `read_with` takes, by the speed at which the beginning is read. Errors are its."""
    with Snapshot(path) as saved:
        talk = _begun(runner, saved, settings)
        ids = _retold(Reader.of(talk.model), talk.settings, saved, cancel).token_ids
    return Price(len(ids), seconds_per_token(talk, ids, cancel) * len(ids))


def seconds_per_token(talk: Conversation, ids: list[int], cancel: Event | None = None) -> float:
    """How fast a new conversation reads, by the beginning of these tokens."""
    per_token, callbacks, done, size = 0.0, Callbacks(cancel=cancel), 0, _FIRST
    talk.read(ids[:size], callbacks=callbacks)  # what is slow the first time
    while done < len(ids):
        part = ids[done : done + size]
        begun = time.monotonic()
        talk.read(part, callbacks=callbacks)
        passed = time.monotonic() - begun
        per_token = passed / len(part)
        done, size = done + len(part), 4 * size
        if passed > _TELLING:
            break
    return per_token


def tokens_with(
    path: Path, settings: Settings, cancel: Event | None, *, tokenizer: Any, max_context: int
) -> int:
    """About how many tokens `read_with` reads with a model that is not loaded yet, for which there
    are these settings. Errors are its."""
    reader = Reader(tokenizer, AnswerForm(), max_context)
    with Snapshot(path) as saved:
        return len(_retold(reader, saved.settings(settings), saved, cancel).token_ids)


def _begun(
    runner: Runner,
    saved: Snapshot,
    settings: dict[str, Any],
    reading: Callbacks = NO_CALLBACKS,
) -> Conversation:
    try:
        return runner.begun(saved, settings)
    except SettingError as error:  # they are another model's
        reading.say(f"it goes on without its own settings: {error}")
        return runner.conversation(system=saved.about.settings.get("system", ""))


def _retold(reader: Reader, settings: Settings, saved: Snapshot, cancel: Event | None) -> Retold:
    """What was said, in the tokens of the model that is to read it."""
    tokenizer, most = reader.tokenizer, reader.max_context
    branches, current = history_from(saved.history(), None, 0)
    documents, former = saved.documents(), Path(saved.about.model).name
    starts, ahead = dict[int, Checkpoint](), list[int]()
    said = [node.text for branch in branches for node in branch.nodes]
    found = [each for text in said for each in as_typed(text, documents).documents]
    waiting = [each for each in documents if each not in found]
    read = [len(each.token_ids) for each in branches]
    read[current] = saved.about.tokens
    if any(map(_begins_unsaid, branches, read)):
        raise SnapshotError(
            "this conversation begins with what a program said, which only the model that read it "
            f"knows: go on with {former}"
        )
    with suppress(ContextError):
        made = [_branch(reader, settings, each, starts, cancel) for each in branches]
        if waiting:
            text = all_of(waiting)
            encode = partial(text_tokens, tokenizer, text, first=False)
            ahead = tokenized(encode, tokenizer, text, most, cancel)
        again = Retold(made, current, documents, waiting, ahead)
        if len(again.token_ids) < most:
            return again
    raise ContextError(
        f"this conversation is too long for {settings.model}, which was trained for {most:,} "
        f"tokens: go on with {former}, or with a model that has a longer context"
    )


def _begins_unsaid(branch: Branch, tokens: int) -> bool:
    """Whether something was read before the first message, or without any."""
    if not branch.nodes:
        return tokens > len(branch.prefilled_ids)
    start = branch.nodes[0].start
    return start.seen != len(start.prefilled_ids)


def _branch(
    reader: Reader,
    settings: Settings,
    branch: Branch,
    starts: dict[int, Checkpoint],
    cancel: Event | None,
) -> Branch:
    """The branch, with all its messages to be read; `starts` are the beginnings that it shares with
    others, by the id of the former one."""
    tokenizer, most = reader.tokenizer, reader.max_context
    ids, pending, tip = list[int](), list[int](), None
    for number, node in enumerate(branch.nodes):
        new = Checkpoint(len(ids), pending, number=number, lost=True)
        start = starts.setdefault(id(node.start), new)
        encode = partial(
            said_tokens,
            tokenizer,
            node.text,
            opening=not number,
            first=not number,
            system=settings.system,
            variables=thinking_variables(settings.thinking),
        )
        prompt = tokenized(encode, tokenizer, node.text, most, cancel)
        ids += [*pending, *prompt]
        tip = Node(
            tip, start, node.text, len(ids), node.answer, node.reasoning, node.reasoning_tokens
        )
        answer = _answer(reader, prompt, node.answer)
        ids, pending = ids + answer[:-1], answer[-1:]
    return Branch(tip, token_ids=ids, end=Checkpoint(len(ids), pending, lost=True))


def _answer(reader: Reader, prompt: list[int], text: str) -> list[int]:
    form, tokenizer, ended = reader.form, reader.tokenizer, list[int]()
    if form.reasoning is not None and opens_reasoning(form, tokenizer, prompt):
        ended = tokenizer.encode(f"\n{form.reasoning.end}\n\n", add_special_tokens=False)
    return [*ended, *text_tokens(tokenizer, text, first=False)]
