"""The one model that is served: loaded and used by one thread, asked by many."""

import asyncio
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvlite.cache.segment import bytes_held
from kvlite.config.paths import data_folder
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.metrics import Piece
from kvlite.conversation.runner import Runner, open_runner
from kvlite.conversation.turn import Turn
from kvlite.memory.device_budget import ERROR
from kvlite.memory.free import free_bytes
from kvlite.model.text_limit import text_limit, too_long
from kvlite.server.answering import Answering
from kvlite.server.chances import Chances, chances, prompt_chances
from kvlite.server.config import ServerConfig
from kvlite.server.conversations import Conversations
from kvlite.server.counters import Counters
from kvlite.server.files import Files
from kvlite.server.refusals import Refusal
from kvlite.web.engine_thread import Engine
from kvlite.web.work import Shown, Work

# Seconds of silence after which a waiting client is told how far things are.
BEAT = 5.0
# Seconds without requests after which conversations go to disk, in case the server is killed.
IDLE = 5.0
# Seconds for work to end with the server, and for what is kept to be written.
_PATIENCE, _SAVING = 5.0, 60.0


@dataclass(frozen=True)
class Ask:
    """What is asked of the model.

    Attributes:
        ids: the whole prompt.
        settings: that differ from the usual ones.
        choices: how many answers.
        top: how many likeliest tokens are told with each; None for no log probabilities.
        scored: whether the log probabilities of the prompt's own tokens are wanted.
        answers: whether anything is wanted after the prompt.
        lent: files of the library that have read its beginning.
    """

    ids: Sequence[int]
    settings: dict[str, Any] = field(default_factory=dict)
    choices: int = 1
    top: int | None = None
    scored: bool = False
    answers: bool = True
    lent: Sequence[Path] = ()


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
    """The model, once it is loaded, and what it has read.

    Attributes:
        names: what requests may call it, the first is its own.
        loading: the work that loads it.
        runner: None until then.
    """

    def __init__(self, settings: Settings, config: ServerConfig) -> None:
        self.config, self.counters = config, Counters()
        self.names = [*dict.fromkeys([_name_of(settings.model), settings.model])]
        self.created = int(time.time())
        self.runner: Runner | None = None
        self.text_limit = 0
        self.conversations: Conversations | None = None
        self.engine = Engine()
        self.answering = Answering(self.engine, self._has_room)
        folder = config.folder or data_folder() / "server"
        self.files = Files(folder / "files")
        self._folder = folder / str(config.port)
        self._ending = False
        self._waits = set[asyncio.Timeout]()
        self.loading = self.engine.submit(
            lambda work: self._load(settings, work), "Loading the model", public="it is loading"
        )

    def ready(self) -> Runner:
        """The model.

        Raises:
            Refusal: it is not loaded yet, or could not be.
        """
        if self.runner is not None:
            return self.runner
        if self.loading.shown.error:
            raise Refusal(f"the model cannot be used: {self.loading.shown.error}", 500)
        raise Refusal("the model is being loaded: try again", 503, code="loading")

    def require_name(self, name: str | None) -> None:
        """Raises Refusal unless this is the model, or none is named."""
        if name is not None and name not in self.names:
            said = f"there is no model {name[:100]!r} here: this server has {self.names[0]!r}"
            raise Refusal(said, 404, "model", "model_not_found")

    def shown_chances(self, tokens: Iterable[Token]) -> list[Chances]:
        """Those of tokens that are part of an answer, which its end is not."""
        ends = self.ready().model.stop_ids
        found = (each.chances for each in tokens if each.chances is not None)
        return [each for each in found if each.own.token_id not in ends]

    def require_short(self, characters: int) -> None:
        """Raises ContextError for more characters than can fit, before they are tokenized."""
        if characters > self.text_limit:
            raise too_long(characters // 4, self.ready().shape.max_context)

    async def answer(self, ask: Ask) -> AsyncGenerator[Token]:
        """The answers, as they come. Whoever stops listening stops them.

        Raises:
            KvliteError, Refusal: as `Conversations.answer` and `until_end`.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Token | None]()

        def put(token: Token | None) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(queue.put_nowait, token)

        def shows(shown: Shown) -> None:
            if shown.ended:
                put(None)

        self.counters.waiting += 1
        work = self.answering.submit(partial(self._answers, ask, put), partial(self._free, ask))
        work.on_show = shows
        shows(work.shown)
        try:
            while True:
                try:
                    async with self.until_end():
                        token = await asyncio.wait_for(queue.get(), BEAT)
                except TimeoutError:
                    yield Token(waiting=_waiting(work))
                    continue
                if token is None:
                    break
                yield token
            if work.failure is not None:
                raise work.failure
        finally:
            self.counters.waiting -= 1
            work.abandon()

    @asynccontextmanager
    async def until_end(self) -> AsyncIterator[None]:
        """What is awaited within is given up when the server ends.

        Raises:
            Refusal: it does.
        """
        ends = Refusal("the server ends: send this again once it is back", 503, code="server_ends")
        if self._ending:
            raise ends
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.remove(wait)
        except TimeoutError:
            if self._ending and wait.expired():
                raise ends from None
            raise

    async def keep_idle(self) -> None:
        """Put conversations on disk, one at a time, whenever nothing was asked for a while."""
        before = -1
        while True:
            await asyncio.sleep(IDLE)
            now = self.counters.generated
            idle = not self.counters.waiting and self.engine.current is None and now == before
            before = now
            if idle:
                self.engine.submit(self._keep, "Keeping")

    def _keep(self, work: Work) -> None:
        if self.conversations is not None:
            self.conversations.store_idle()

    def end_requests(self) -> None:
        """Give up all requests, and all that come; called in the loop that answers them."""
        self._ending = True
        for wait in self._waits:
            wait.reschedule(0)

    def close(self) -> None:
        """End what is being done, and keep what was read."""
        self.engine.close(self._end, _PATIENCE, _SAVING)

    def _load(self, settings: Settings, work: Work) -> None:
        runner = open_runner(settings, notify=work.begin, cancel=work.cancel)
        config = self.config
        conversations = Conversations(runner, config.keep, config.keep_disk, self._folder)
        conversations.resume()
        self.conversations = conversations
        self.text_limit = text_limit(runner.model.tokenizer, runner.shape.max_context)
        self.runner = runner

    def _answers(
        self, ask: Ask, put: Callable[[Token], None], work: Work
    ) -> Generator[Turn | None]:
        """As `answering.Answer`."""
        assert self.conversations is not None and self.runner is not None
        if ask.scored:
            scores = prompt_chances(self.runner.model, ask.ids, ask.top or 0, work.callbacks)
            put(Token(prompt=tuple(scores)))
            yield None
        for path in ask.lent:
            self.conversations.lend(path)
        for choice in range(ask.choices if ask.answers else 0):
            settings = {**ask.settings}
            if choice and settings.get("seed") is not None:
                settings["seed"] += choice
            ids, counted = [*ask.ids], False
            for piece, talk in self.conversations.answer(ids, settings, work.callbacks):
                if not counted:
                    counted = True
                    self.counters.read(len(ids), piece.metrics)
                self.counters.generated += piece.token_id is not None
                put(Token(choice, piece, _chances(talk, piece, ask.top)))
                yield talk.context.turn if piece.metrics.finish_reason is None else None
            self.counters.last = piece.metrics

    def _free(self, ask: Ask) -> bool:
        """Whether nothing is being used that a request would better go on with."""
        return self.conversations is None or not self.conversations.waits(ask.ids, ask.settings)

    def _has_room(self, turns: Sequence[Turn]) -> bool:
        """Whether one more answer may begin beside those of these turns."""
        runner = self.ready()
        if runner.model.device.type != "cpu" or runner.settings.vram != "auto":
            return False  # planned for one
        weights = bytes_held(runner.model.tensors())
        planned = max((each.run_stats.planned or 0 for each in turns), default=0)
        held = max((each.cache.nbytes for each in turns), default=0)
        return max(held, planned - weights) <= (1 - ERROR) * free_bytes(runner.model.device)

    def _end(self, work: Work) -> None:
        if self.conversations is not None:
            self.conversations.close()


def _chances(talk: Conversation, piece: Piece, top: int | None) -> Chances | None:
    turn = talk.context.turn
    if top is None or piece.token_id is None or turn is None:
        return None
    return chances(turn.logits[0], piece.token_id, top)


def _waiting(work: Work) -> str:
    """How far work is, in words."""
    shown = work.shown
    if shown.before:
        return f"waiting, {shown.before} before this one"
    return f"reading, {shown.done / shown.total:.0%}" if shown.total else "working"


def _name_of(model: str) -> str:
    """What a model is called: the last part of a path, or a Hugging Face id."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model
