"""A model that is served: loaded and used by one thread, asked by many."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvlite.cache.segment import bytes_held
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.metrics import Piece
from kvlite.conversation.prefix import require_answerable
from kvlite.conversation.record import StoredMessage, ToldTimes
from kvlite.conversation.runner import Runner, open_runner
from kvlite.errors import KvliteError, Stopped
from kvlite.memory.free import return_memory, settle_heap
from kvlite.model.local_models import LocalModel
from kvlite.model.text_limit import too_long
from kvlite.server.answering import READING, Answering, Pause
from kvlite.server.chances import Chances, chances, prompt_chances
from kvlite.server.conversations import Conversations
from kvlite.server.refusals import Refusal, in_fields
from kvlite.server.state import ServerState
from kvlite.web.work import Shown, Work

# While others are answered, a conversation is put on disk after so many seconds, and so many times
# as many as that took.
_OFTEN, _SHARE = 2.0, 20
# Seconds of silence after which a waiting client is told how far things are; and the first of them,
# in which what is wrong with a request is still an answer of its own.
BEAT, FIRST_BEAT = 5.0, 0.25
# Of a request, what comes before its first answer.
_PROMPT = -1


@dataclass(frozen=True)
class Ask:
    """What is asked of the model.

    Attributes:
        ids: the whole prompt.
        settings: that differ from the usual ones.
        choices: how many answers.
        top: how many likeliest tokens are told with each; None for no log probabilities.
        scored: whether the log probabilities of the prompt's own tokens are wanted.
        answers: whether the prompt is read for more than that.
        empty: whether nothing is wanted after the prompt.
        lent: files of the library that have read its beginning.
        said: the prompt for people.
        times: that the prompt tells.
        notes: sentences that come with the answer.
        parting: tokens after which other prompts may go on otherwise, where that is looked for.
    """

    ids: Sequence[int]
    settings: dict[str, Any] = field(default_factory=dict)
    choices: int = 1
    top: int | None = None
    scored: bool = False
    answers: bool = True
    empty: bool = False
    lent: Sequence[Path] = ()
    said: Sequence[StoredMessage] = ()
    times: Sequence[ToldTimes] = ()
    notes: Sequence[str] = ()
    parting: int = 0


@dataclass(frozen=True)
class Token:
    """A piece of one of the answers, and how likely its token was; or how likely those of the
    prompt were; or a sentence on how far it is, while nothing comes."""

    choice: int = 0
    piece: Piece | None = None
    chances: Chances | None = None
    prompt: tuple[Chances, ...] = ()
    waiting: str = ""


class ServedModel:
    """A model, while it is loaded and what it has read, and while it is not.

    Attributes:
        names: what requests may call it, the first is its own.
        loading: the work that loads it; None if nothing has, or it was unloaded.
        conversations: None while it is not loaded.
        users: requests that need it.
        local: what is known of it before it is loaded.
        planned: bytes that it takes at least, once that is known.
    """

    def __init__(
        self,
        names: list[str],
        settings: Settings,
        state: ServerState,
        local: LocalModel | None = None,
    ) -> None:
        self.names, self.settings, self.state = names, settings, state
        self.local, self._max_context = local, local.max_context if local else None
        self.users = self.planned = 0
        self.conversations: Conversations | None = None
        self.answering = Answering(state.engine, self._shares, self._keep_some)
        self.loading: Work | None = None
        self._keep_next = 0.0

    @property
    def runner(self) -> Runner | None:
        """None while it is not loaded."""
        conversations = self.conversations
        return None if conversations is None else conversations.runner

    def load(self) -> Work:
        """Have it loaded."""
        title = f"Loading {self.names[0]}"
        self.loading = self.state.engine.submit(self._load, title, public="it is loading")
        return self.loading

    def unload(self) -> Work:
        """Have it unloaded; what it has read is kept on disk."""
        return self.state.engine.submit(self._unload, f"Unloading {self.names[0]}")

    def ready(self) -> Runner:
        """The model. Raises Refusal if it is not loaded yet, or could not be."""
        if (runner := self.runner) is not None:
            return runner
        if self.loading is not None and self.loading.shown.error:
            said = in_fields(self.loading.shown.error)
            raise Refusal(f"the model cannot be used: {said}", 500)
        raise Refusal("the model is being loaded: try again", 503, code="loading")

    @property
    def told_times(self) -> list[ToldTimes]:
        """Dates and times in prompts that are kept, those of the last one first."""
        kept = [] if (now := self.conversations) is None else [*now.kept]
        return [time for each in sorted(kept, key=lambda each: -each.used) for time in each.times]

    @property
    def status(self) -> str:
        """loaded, loading, failed or unloaded."""
        if self.runner is not None:
            return "loaded"
        if self.loading is None:
            return "unloaded"
        return "failed" if self.loading.shown.ended else "loading"

    @property
    def is_awaited(self) -> bool:
        """Whether it will be there, unless loading it fails; the app's is, once it is lent."""
        return self.runner is None and self.loading is not None and not self.loading.shown.error

    @property
    def max_context(self) -> int | None:
        """Tokens it was trained to hold, if that is known."""
        runner = self.runner
        return self._max_context if runner is None else runner.shape.max_context

    @property
    def held_bytes(self) -> int:
        """Bytes that would be free without it."""
        if (now := self.conversations) is None:
            return 0
        return bytes_held(now.runner.model.tensors()) + now.held_bytes

    def require_short(self, characters: int) -> None:
        """Raises ContextError for more characters than can fit, before they are tokenized."""
        runner = self.ready()
        if characters > runner.text_limit:
            raise too_long(characters // 4, runner.shape.max_context)

    async def answer(self, ask: Ask) -> AsyncGenerator[Token]:
        """The answers, as they come. Whoever stops listening stops them. Raises KvliteError or
        Refusal as `Conversations.answer`, `ready` and `require_up`."""
        runner = self.ready()
        self.state.require_up()
        if ask.answers:
            settings = runner.settings.after_load(ask.settings)
            await asyncio.to_thread(require_answerable, runner.model, ask.ids, settings)
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Token | None]()

        def put(token: Token | None) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(queue.put_nowait, token)

        def shows(shown: Shown) -> None:
            if shown.ended:
                put(None)

        self.users += 1
        self.state.counters.waiting += 1
        left = [*[_PROMPT] * ask.scored, *range(ask.choices if ask.answers else 0)]
        answers = partial(self._answers, ask, left, put)
        work = self.answering.submit(answers, partial(self._free, ask), partial(self._unread, ask))
        work.on_show = shows
        shows(work.shown)
        try:
            with self.state.at_end(partial(queue.put_nowait, None)):
                beat = FIRST_BEAT
                while (token := await _next(queue, work, beat)) is not None:
                    yield token
                    beat = BEAT
            self.state.require_up()
            if work.failure is not None and self.conversations is None:
                raise Refusal("the model was unloaded: send this again", 503, code="unloaded")
            if work.failure is not None:
                raise work.failure
        finally:
            self.users -= 1
            self.state.counters.waiting -= 1
            work.abandon()

    def keep(self) -> Work:
        """Have a conversation put on disk, if one is not there."""
        return self.state.engine.submit(self._keep, "Keeping")

    def _keep(self, work: Work) -> None:
        if self.conversations is not None:
            self.conversations.store_idle()

    def _keep_some(self) -> None:
        """Now and then put an idle conversation on disk, as others may be answered for hours."""
        now = time.monotonic()
        if self.conversations is not None and now >= self._keep_next:
            self.conversations.store_idle()
            self._keep_next = now + max(_OFTEN, _SHARE * (time.monotonic() - now))

    def use(self, runner: Runner) -> None:
        """Answer with a model that has been loaded; called by the engine's thread."""
        config, library = self.state.config, self.state.library
        conversations = Conversations(runner, config.keep, config.keep_disk, library)
        conversations.resume()
        self.conversations, self._max_context = conversations, runner.shape.max_context
        self.planned = 0 if runner.plan is None else runner.plan.peak_bytes
        settle_heap()

    def release(self) -> None:
        """Let the model go, and keep what it has read on disk; called by the engine's thread."""
        if self.conversations is not None:
            self.conversations.set_aside()
        self.conversations = None

    def _load(self, work: Work) -> None:
        self.use(open_runner(self.settings, notify=work.begin, cancel=work.cancel))

    def _unload(self, work: Work) -> None:
        if (runner := self.runner) is None:
            return
        devices = runner.model.all_devices
        del runner
        self.release()
        self.loading = None
        return_memory(devices)

    def _answers(
        self, ask: Ask, left: list[int], put: Callable[[Token], None], work: Work
    ) -> Generator[Pause]:
        """All that is `left` to answer; what is whole leaves that, and does not come again."""
        if (runner := self.runner) is None or self.conversations is None:
            raise Stopped
        if self.state.make_way is not None:
            work.planned = partial(self._make_way, self.state.make_way, work)
        if _PROMPT in left:
            scores = prompt_chances(runner.model, ask.ids, ask.top or 0, work.callbacks)
            put(Token(prompt=tuple(scores)))
            left.remove(_PROMPT)
            yield Pause()
        for path in ask.lent:
            self.conversations.lend(path)
        for choice in [*left]:
            settings = {**ask.settings}
            if choice and settings.get("seed") is not None:
                settings["seed"] += choice
            ids, counted = [*ask.ids], False
            # Of a prompt that was left half read everything counts as known.
            work.show(title=f" of {self._unread(ask) or len(ids):,} tokens")
            piece: Piece | None = None
            try:
                more: dict[str, Any] = {"said": ask.said, "times": ask.times}
                more["parting"] = ask.parting
                pieces = self.conversations.answer(ids, settings, work.callbacks, **more)
                for piece, talk in pieces:
                    if piece is None:
                        yield READING
                        continue
                    if not counted:
                        counted = True
                        self.state.counters.read(len(ids), piece.metrics)
                    piece = _without_token(piece) if ask.empty else piece
                    self.state.counters.generated += piece.token_id is not None
                    put(Token(choice, piece, _chances(talk, piece, ask.top)))
                    goes_on = piece.finish_reason is None
                    yield Pause(talk.context.turn if goes_on else None)
            finally:
                if piece is not None:  # an answer that nobody waits for any more took time, too
                    self.state.counters.end(piece.metrics)
            left.remove(choice)

    def _free(self, ask: Ask) -> bool:
        """Whether nothing is being used that a request would better go on with."""
        return self.conversations is None or not self.conversations.waits(ask.ids, ask.settings)

    def _unread(self, ask: Ask) -> int:
        """How many tokens of a prompt have to be read."""
        if self.conversations is None:
            return len(ask.ids)
        return self.conversations.unread(ask.ids, ask.settings)

    def _shares(self) -> bool:
        """Whether an answer may begin beside others, if there is memory for it."""
        return self.ready().plans_for_others

    def _make_way(self, make_way: Callable[[Work], None], work: Work, nbytes: int) -> None:
        """Have others of this program free what they can; answers do not depend on it."""
        with suppress(KvliteError):
            make_way(work)


def _without_token(piece: Piece) -> Piece:
    """A piece of an answer that has no tokens, where one had to be made."""
    reason, figures = piece.finish_reason, piece.figures.changed(generated_tokens=0)
    if reason not in (None, "memory"):
        reason, figures = "length", figures.changed(limit="answer")
    nothing = replace(piece, token_id=None, text="", raw="", reasoning="")
    return replace(nothing, finish_reason=reason, figures=figures)


def _chances(talk: Conversation, piece: Piece, top: int | None) -> Chances | None:
    turn = talk.context.turn
    if top is None or piece.token_id is None or turn is None:
        return None
    return chances(turn.logits[0], piece.token_id, top)


async def _next(queue: asyncio.Queue[Token | None], work: Work, beat: float) -> Token | None:
    """What comes next, or how far the work is where nothing comes for so many seconds."""
    try:
        async with asyncio.timeout(beat):
            return await queue.get()
    except TimeoutError:
        return Token(waiting=_waiting(work))


def _waiting(work: Work) -> str:
    shown = work.shown
    if shown.before:
        return f"waiting, {shown.before} before this one"
    return f"reading, {shown.done / shown.total:.0%}{shown.title}" if shown.total else "working"
