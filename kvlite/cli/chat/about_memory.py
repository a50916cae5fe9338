"""Commands about memory: where it is, what was planned, what the last answer took."""

from kvlite.cli.chat.memory_view import MemoryView
from kvlite.cli.chat.plan_view import PlanView
from kvlite.cli.chat.terminal import Terminal
from kvlite.config.units import readable
from kvlite.conversation.metrics import told
from kvlite.conversation.session import Session
from kvlite.errors import SettingError
from kvlite.planner.usage import Place, holding, places


def memory(session: Session, terminal: Terminal, argument: str) -> None:
    """Draw where every megabyte is."""
    terminal.show(MemoryView(now(session)))
    if session.last is not None:
        terminal.say(f"The last answer's peak: {readable(session.last.peak_bytes)}.")


def now(session: Session) -> list[Place]:
    """Where it is now, the device first."""
    talk = session.talk
    held = holding(talk.model, talk.cache, talk.store, talk.checkpoint_bytes)
    return places(talk.model.device, held, session.runner.settings.vram)


def plan(session: Session, terminal: Terminal, argument: str) -> None:
    """Show what was planned before the model was loaded."""
    if session.runner.plan is None:
        raise SettingError("no plan could be made of this model")
    terminal.show(PlanView(session.runner.plan))


def metrics(session: Session, terminal: Terminal, argument: str) -> None:
    """Say what the last answer was made from."""
    if session.last is None:
        raise SettingError("nothing has been answered yet")
    for sentence in told(session.last):
        terminal.say(sentence)
