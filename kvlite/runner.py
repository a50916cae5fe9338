"""A loaded model, ready to read and answer."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvlite.cache import parse_kv_bits
from kvlite.conversation import Conversation
from kvlite.engine.selfcheck import require_own_answers
from kvlite.ledger import Answer
from kvlite.methods.amount import method_and_amount
from kvlite.methods.rules import require_growing
from kvlite.model.calibration import find_calibration
from kvlite.model.load import LoadedModel, choose_device, load_model
from kvlite.model.shape import ModelShape, read_shape
from kvlite.model.source import find_model
from kvlite.model.weights import choose_weights
from kvlite.offload.room import ram_limit
from kvlite.offload.streaming import load_streamed, require_streamable
from kvlite.settings import Settings


class Runner:
    """Answers from token ids, and opens conversations.

    Attributes:
        model: the loaded model.
        settings: defaults for everything asked of it.
    """

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        self.model = model
        self.settings = settings

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.model.tokenizer

    @property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        return self.model.shape

    @property
    def model_path(self) -> Path:
        """The folder of the safetensors in use."""
        return self.model.path

    def conversation(self, **settings: Any) -> Conversation:
        """A new, empty conversation.

        Args:
            settings: override the runner's, for this conversation.
        """
        return Conversation(self.model, self.settings.after_load(settings))

    def generate(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int | None = None,
        ignore_eos: bool = False,
        **settings: Any,
    ) -> Answer:
        """Read `token_ids` and answer, in a conversation of its own.

        Args:
            max_new_tokens: the longest answer; None as the settings say.
            ignore_eos: go on past the model's end-of-text tokens.
            settings: override the runner's, for this answer.
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
        notify: told in a sentence before anything that takes more than a few seconds.
        settings: defaults for everything asked of the runner (see `Settings`).

    Raises:
        ModelError: it cannot be found, opened or run.
        SettingError: a setting is unknown or out of range.
    """
    if model is not None:
        settings["model"] = model
    return open_runner(Settings().replace(settings), notify)


def open_runner(settings: Settings, notify: Callable[[str], None] | None = None) -> Runner:
    """`load` from whole settings; everything is checked before a weight is read."""
    method, _ = method_and_amount(settings.method, settings.budget)
    require_growing(parse_kv_bits(settings.kv_bits), method)
    ram_limit(settings.recall_limit, 0)
    device = choose_device(settings.device)
    folder = find_model(settings.model, notify)
    weights = choose_weights(settings.weights, device, folder)
    require_streamable(settings.stream, folder, device=device, weights=weights)
    calibration = find_calibration(folder)
    if calibration is None:
        method.fitted(read_shape(folder), None)
    opened = load_model if settings.stream == "off" else partial(load_streamed, settings.stream)
    model = opened(folder, device=device, weights=weights, calibration=calibration)
    if weights.stored:
        require_own_answers(model)
    return Runner(model, settings)
