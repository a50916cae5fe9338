"""The models of this machine, one of which is loaded: requests name them."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from kvlite.config.settings import Settings
from kvlite.config.units import readable
from kvlite.conversation.runner import FEW
from kvlite.errors import ForecastError, ModelError, sentence
from kvlite.memory.free import trim_heap
from kvlite.model.local_models import LocalModel, models_here
from kvlite.model.source import lasting_name
from kvlite.planner.fitting import plan_here
from kvlite.planner.plan import refusal
from kvlite.server.config import names_of
from kvlite.server.refusals import Refusal, in_fields
from kvlite.server.served_model import ServedModel
from kvlite.server.state import ServerState
from kvlite.web.work import Shown, Work

_LOG = logging.getLogger("kvlite.server")
# Seconds without requests after which conversations go to disk, in case the server is killed.
IDLE = 5.0
# Seconds that a list of models is true for, and that one who asks for it waits.
_STALE, _QUICK = 10.0, 2.0
# Seconds that a request waits while the model it needs is loaded, and between two looks.
_LOADING, _LOOK = 60.0, 0.05
# Seconds for work to end with the server, and for what is kept to be written.
_PATIENCE, _SAVING = 5.0, 60.0


class Models:
    """Those that requests may name.

    Attributes:
        first: the one that the server is started with; its `load` is called by who starts it.
        current: the one that is loaded, or was last; used where a request names none.
    """

    def __init__(self, settings: Settings, state: ServerState) -> None:
        self.state = state
        self.first = self.current = ServedModel(names_of(settings.model), settings, state)
        self._served = dict[str, ServedModel]()
        self._here: Sequence[LocalModel] = ()
        self._looked = float("-inf")
        self._looking: asyncio.Task[None] | None = None
        self._created, self._switching = int(time.time()), asyncio.Lock()

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[ServedModel]:
        """A model, which stays loaded meanwhile; it is loaded if it is not. Raises Refusal if there
        is none of this name, or another is in use, and KvliteError if it does not fit this machine,
        or cannot be loaded."""
        model = await self._named(name)
        if model.loading is None:
            await self._require_fit(model)
        async with self._switching:
            if model.loading is None:
                await self._switch_to(model)
            model.ready()
            model.users += 1
        try:
            yield model
        finally:
            model.users -= 1

    async def known(self, name: str | None) -> str | None:
        """A name that this server has, or None for the loaded model: some programs name those of
        their maker, for side requests too."""
        try:
            await self._named(name)
        except Refusal as error:
            if error.code != "model_not_found":
                raise
            _LOG.info("%s is answered by %s", str(name)[:100], self.current.names[0])
            return None
        return name

    async def until_loaded(self, name: str | None) -> ServedModel:
        """A model; if it is being loaded, once it is, after a minute at most. Raises Refusal if it
        is not loaded by then, or cannot be. Nothing is lost where nobody waits any more."""
        model, until = await self._named(name), time.monotonic() + _LOADING
        while model.is_awaited and time.monotonic() < until:
            await asyncio.sleep(_LOOK)
        if model.loading is not None:
            model.ready()
        return model

    async def about(self, name: str | None = None) -> list[dict[str, Any]]:
        """Every model that can be used, or one, as `/v1/models` has it; at once, whatever is being
        done. Raises Refusal if there is none of this name."""
        if name is not None:
            return [self._about(await self._named(name))]
        return [self._about(each) for each in await self.listed()]

    async def listed(self) -> list[ServedModel]:
        """Every model that can be used; at once, whatever is being done."""
        others = [self._of(each) for each in await self._others() if not each.flaw]
        return [self.first, *others]

    def require_healthy(self) -> None:
        """Raises Refusal unless a model is loaded, or was and will be again."""
        if self.current.loading is not None:
            self.current.ready()

    async def keep_idle(self) -> None:
        """Whenever nothing was asked for a while, put conversations on disk, one at a time, and
        after a longer while unload the model. Freed memory goes back all the time."""
        before, since = -1, time.monotonic()
        while True:
            await asyncio.sleep(IDLE)
            await asyncio.to_thread(trim_heap)  # of large requests
            model, now = self.current, self.state.counters.generated
            if self.state.engine.current is not None or now != before:
                before, since = now, time.monotonic()
            elif 0 < self.state.config.unload_after <= time.monotonic() - since:
                await self._unload_idle(model)
            else:
                model.keep()

    async def _unload_idle(self, model: ServedModel) -> None:
        async with self._switching:
            if model.runner is not None and not model.users:
                _LOG.info("%s is unloaded, as nobody asks it anything", model.names[0])
                await _ended(model.unload())

    def close(self) -> None:
        """End what is being done, and keep what was read."""
        self.state.engine.close(lambda work: self.current.release(), _PATIENCE, _SAVING)

    async def _named(self, name: str | None) -> ServedModel:
        """Raises Refusal if it is not there, or cannot be run."""
        if name is None:
            return self.current
        known = (self.current, self.first)
        for loaded in known:
            if name in loaded.names:
                return loaded
        others = await self._others()
        found = next((each for each in others if each.name == name), None)
        if found is None:  # by a shorter name, or in other letters, unless another has it, too
            for loaded in known:
                if any(is_alike(name, each) for each in loaded.names):
                    return loaded
            like = [each for each in others if is_alike(name, each.name)]
            found = like[0] if len(like) == 1 else None
        if found is None:
            here = f"this server has {self.first.names[0]!r}"
            more = "" if self.state.config.one_model else " and what /v1/models lists"
            said = f"there is no model {name[:100]!r} here: {here}{more}"
            raise Refusal(said, 404, "model", "model_not_found")
        if found.flaw:
            raise _cannot_be_run(found.name, found.flaw)
        return self._of(found)

    async def _others(self) -> Sequence[LocalModel]:
        """Models on this machine that can be loaded; as of before, where looking takes long."""
        if self.state.config.one_model:
            return ()
        if self._looking is None and time.monotonic() - self._looked > _STALE:
            self._looking = asyncio.create_task(self._look())
        if self._looking is not None:
            await asyncio.wait({self._looking}, timeout=_QUICK)
        return self._here

    async def _look(self) -> None:
        own = lasting_name(self.first.settings.model)
        try:
            found = await asyncio.to_thread(models_here)
            self._here = [each for each in found if lasting_name(each.name) != own]
        finally:
            self._looking, self._looked = None, time.monotonic()

    def _of(self, found: LocalModel) -> ServedModel:
        if found.name not in self._served:
            settings = self.first.settings.replace({"model": found.name, "chat_template": ""})
            served = ServedModel([found.name], settings, self.state, found)
            self._served[found.name] = served
        return self._served[found.name]

    def _about(self, model: ServedModel) -> dict[str, Any]:
        longest = model.max_context
        about = {
            "id": model.names[0],
            "object": "model",
            "created": self._created,
            "owned_by": "kvlite",
            "status": {"value": model.status},
        }
        meta: dict[str, Any] = {"loading": model.status == "loading"}
        if longest is None:
            return {**about, "meta": meta}
        return {**about, "max_model_len": longest, "meta": {"n_ctx": longest, **meta}}

    async def _require_fit(self, model: ServedModel) -> None:
        """Refuse a model that does not fit even once the other one is gone. Raises SettingError
        with the numbers, and Refusal if it cannot be run."""
        freed = self.current.held_bytes
        try:
            plan = await asyncio.to_thread(plan_here, model.settings, FEW, freed)
        except ForecastError:
            return  # loading it will tell
        except ModelError as error:
            raise _cannot_be_run(model.names[0], sentence(error)) from error
        model.planned = plan.peak_bytes
        if not plan.fits:
            raise refusal(plan)

    async def _switch_to(self, model: ServedModel) -> None:
        now = self.current
        if now.users:
            raise Refusal(
                f"{model.names[0]} needs {readable(model.planned)} and is loaded once "
                f"{now.names[0]}, which holds {readable(now.held_bytes)}, has answered its open "
                f"requests ({now.users}): try again",
                503,
                code="busy",
            )
        _LOG.info("%s is loaded in place of %s", model.names[0], now.names[0])
        await _ended(now.unload())
        self.current = model
        try:
            await _ended(model.load())
        except ModelError as error:
            raise _cannot_be_run(model.names[0], sentence(error)) from error
        finally:
            if model.runner is None:
                model.loading, self.current = None, now


def _cannot_be_run(name: str, reason: str) -> Refusal:
    said = in_fields(reason if reason.startswith(name) else f"{name}: {reason}")
    return Refusal(f"a model cannot be run: {said}", 400, "model")


def is_alike(name: str, model: str) -> bool:
    """Whether a request that names a model may mean this one: in upper or lower case, with or
    without its folder or owner, `.gguf`, the number of its first part, `ollama:` and `:latest`."""
    asked, whole = _plain(name), _plain(model)
    return bool(asked) and asked in (whole, re.split(r"[/\\]", whole)[-1])


def _plain(name: str) -> str:
    name = name.lower().removeprefix("ollama:").removesuffix(":latest")
    return re.sub(r"(-0*1-of-\d+)?\.gguf$", "", name)


async def _ended(work: Work) -> None:
    """Wait for work, in no thread that could keep the server from ending. Raises what went
    wrong."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def shows(shown: Shown) -> None:
        if shown.ended:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(ended.set)

    work.on_show = shows
    shows(work.shown)
    await ended.wait()
    if work.failure is not None:
        raise work.failure
