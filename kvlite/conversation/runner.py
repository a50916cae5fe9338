"""A loaded model, ready to read and answer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

from kvlite.config.arguments import path_of, require_callable
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.metrics import Answer
from kvlite.conversation.prepared import Prepared, prepare
from kvlite.conversation.snapshot import Snapshot
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks, Progress, require_callbacks
from kvlite.model.load import LoadedModel
from kvlite.model.shape import ModelShape
from kvlite.model.text_limit import text_limit
from kvlite.planner.plan import Plan


class Runner:
    """A loaded model: begins and opens conversations.

    Attributes:
        settings: the defaults of its conversations, with the plan's choices filled in.
        plan: made before weights were read; None if there could be none.
    """

    def __init__(self, model: LoadedModel, settings: Settings, plan: Plan | None = None) -> None:
        self.model = model
        self.settings = settings
        self.plan = plan

    @classmethod
    def of(
        cls,
        prepared: Prepared,
        notify: Callable[[str], None] | None = None,
        cancel: Event | None = None,
    ) -> "Runner":
        """A prepared model, whose weights are read now. Args and errors are those of
        `Prepared.load`."""
        model, plan = prepared.load(notify, cancel)
        return cls(model, prepared.choice.applied(prepared.settings), plan)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.model.tokenizer

    @property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        return self.model.shape

    @property
    def text_limit(self) -> int:
        """The most characters that can possibly fit the model."""
        return text_limit(self.tokenizer, self.shape.max_context)

    @property
    def plans_for_others(self) -> bool:
        """Whether an answer leaves memory to others that are read or come beside it."""
        return self.settings.vram == "auto"

    @property
    def model_path(self) -> Path:
        """The folder of the safetensors in use."""
        return self.model.path

    def conversation(self, **settings: Any) -> Conversation:
        """A new conversation; `settings` override the runner's."""
        return Conversation(self.model, self.settings.after_load(settings))

    def open(
        self,
        path: str | Path,
        *,
        progress: Progress | None = None,
        reading: Callbacks = NO_CALLBACKS,
        **settings: Any,
    ) -> Conversation:
        """Go on with a saved conversation.

        Args:
            progress: called with (bytes read, bytes in all).
            reading: follows the tokens of a light file being read again.
            settings: override those it was saved with.

        Raises:
            SnapshotError: the file is not a snapshot, damaged, or of another model or a newer
                format.
            OutOfMemory: there is no room for it.
            SettingError: a setting is unknown or out of range.
            Stopped: `reading.cancel` was set.
        """
        require_callable(progress, "progress")
        require_callbacks(reading, "reading")
        with Snapshot(path_of(path)) as saved:
            chosen = saved.settings(self.settings).after_load(settings)
            talk = Conversation(self.model, chosen)
            saved.restore(talk, progress, reading)
            return talk

    def generate(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int | None = None,
        ignore_eos: bool = False,
        **settings: Any,
    ) -> Answer:
        """Read `token_ids` and answer, in a new conversation; `settings` override the runner's.

        Args:
            ignore_eos: go on past the model's end-of-text tokens.
        """
        if max_new_tokens is not None:
            settings["max_new_tokens"] = max_new_tokens
        return self.conversation(**settings).generate(token_ids, ignore_eos=ignore_eos)


def load(
    model: str | None = None, *, notify: Callable[[str], None] | None = None, **settings: Any
) -> Runner:
    """Open a model.

    Args:
        model: the embedded `smollm2-135m` (default), a folder, a GGUF file, or a Hugging Face id.
        notify: called with a sentence before anything that takes more than a few seconds.
        settings: defaults for all conversations (see `Settings`).

    Raises:
        ModelError: it cannot be found, opened or run.
        SettingError: a setting is unknown or out of range.
    """
    require_callable(notify, "notify")
    if model is not None:
        settings["model"] = model
    return open_runner(Settings().replace(settings), notify)


def open_runner(
    settings: Settings,
    notify: Callable[[str], None] | None = None,
    reads: Callable[..., int] | None = None,
    cancel: Event | None = None,
) -> Runner:
    """`load` from complete settings. Everything is checked and planned before weights are read.
    Args and errors are those of `prepare`."""
    return Runner.of(prepare(settings, notify, reads, cancel), notify, cancel)
