"""A session goes on with another model, or with the former one as if nothing had been tried."""

from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from kvlite.conversation.conversation import Conversation
from kvlite.conversation.message import counted_tokens
from kvlite.conversation.retold import price_of, read_with, tokens_with
from kvlite.conversation.runner import Runner, open_runner, prepare
from kvlite.conversation.session import Session
from kvlite.engine.callbacks import Callbacks
from kvlite.errors import SnapshotError
from kvlite.memory.free import return_memory
from kvlite.model.files import fingerprint
from kvlite.planner.usage import holding


def change_model(session: Session, model: str, callbacks: Callbacks) -> None:
    """Load a model in place of the session's, and let it read again what was said; what that takes
    is told before it begins.

    Raises:
        KvliteError, OSError: it cannot be found, loaded, or read so much; the former model is in
            use as before.
        Stopped: likewise, as `callbacks.cancel` was set.
    """
    former, talk = session.given, session.talk
    given = former.replace({"model": model})
    talk.history.give_up_reading()
    held = holding(talk.model, talk.cache, talk.store, talk.context.checkpoint_bytes)
    freed, devices = sum(part.nbytes for part in held.device), talk.model.all_devices
    session.library.root.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="model-", dir=session.library.root) as folder:
        saved, cancel = Path(folder) / "talk.kv", callbacks.cancel
        _save(talk, saved)
        said = bool(talk.messages or session.waiting)
        reads = partial(tokens_with, saved, given, cancel) if said else None
        prepared = prepare(given, callbacks.notify, reads, cancel, freed)
        fingerprint(prepared.folder)  # raises ModelError where files are damaged
        del prepared, talk
        session.let_go()
        return_memory(devices)
        try:
            runner = open_runner(given, callbacks.notify, reads, cancel)
            talk = _read(runner, saved, Path(former.model).name, callbacks)
        except Exception as error:
            failure = error.with_traceback(None)  # whose frames hold what was there
        else:
            session.go_on(runner, given, talk)
            return
        return_memory(devices)
        runner = open_runner(former)
        session.go_on(runner, former, runner.open(saved))
    raise failure


def _save(talk: Conversation, path: Path) -> None:
    with suppress(SnapshotError, OSError):  # there may be no room for its cache
        talk.save(path)
        return
    talk.save(path, light=True)


def _read(runner: Runner, saved: Path, former: str, callbacks: Callbacks) -> Conversation:
    price = price_of(runner, saved, callbacks.cancel)
    if price.tokens:
        tokens, seconds = counted_tokens(price.tokens), max(1, round(price.seconds))
        took = f"{seconds} s" if seconds < 90 else f"{round(seconds / 60)} minutes"
        callbacks.say(
            f"{Path(runner.settings.model).name} reads {tokens} again, about {took}; Ctrl-C stays "
            f"with {former}"
        )
    return read_with(runner, saved, callbacks)
