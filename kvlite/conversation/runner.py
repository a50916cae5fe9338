"""A model: found, checked and planned; its weights read; ready to read and answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Event
from typing import Any

import torch

from kvlite.config.arguments import path_of, require_callable
from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.metrics import Answer
from kvlite.conversation.snapshot import Snapshot
from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks, Progress, require_callbacks
from kvlite.engine.selfcheck import require_own_answers
from kvlite.errors import ForecastError, SettingError
from kvlite.memory.device_budget import hold
from kvlite.memory.free import is_oom, release_memory
from kvlite.methods.budget import require_budget
from kvlite.methods.engine_config import EngineConfig, require_meanings
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.architectures import UNTESTED, architecture
from kvlite.model.devices import choose_devices
from kvlite.model.identity import Identity
from kvlite.model.load import LoadedModel, load_model, use_chat_template
from kvlite.model.shape import ModelShape
from kvlite.model.source import find_model
from kvlite.model.text_limit import text_limit
from kvlite.model.weights import PLAIN
from kvlite.offload.weights.experts import LEAST
from kvlite.offload.weights.loader import STREAMED, load_mtp, open_whole
from kvlite.ops.device import has_triton
from kvlite.planner.candidates import planner_here
from kvlite.planner.choice import Choice
from kvlite.planner.plan import Plan, refusal
from kvlite.planner.planner import Planner

# Tokens planned for if nobody says how many will be read; and the fewest that must fit.
TOKENS, FEW = 4096, 256


class Runner:
    """A loaded model: begins and opens conversations.

    Attributes:
        config: the defaults of its conversations, with the plan's choices filled in.
        plan: made before weights were read; None if there could be none.
    """

    def __init__(
        self, model: LoadedModel, settings: Settings | EngineConfig, plan: Plan | None = None
    ) -> None:
        """Raises SettingError if settings cannot be parsed, or do not fit each other."""
        self.model = model
        self.config = require_meanings(settings)
        self.plan = plan

    @property
    def settings(self) -> Settings:
        """The defaults of its conversations, as given."""
        return self.config.settings

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
        return Conversation(self.model, self.config.after_load(settings))

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
            talk = self.begun(saved, settings)
            saved.restore(talk, progress, reading)
            return talk

    @cached_property
    def identity(self) -> Identity:
        """The model's. Raises ModelError if a weight file is damaged."""
        return Identity.of(self.model)

    def begun(self, saved: Snapshot, settings: dict[str, Any]) -> Conversation:
        """A new conversation by the settings of a saved one, but for these. Raises SettingError if
        they do not fit this model."""
        chosen = saved.settings(self.settings).after_load(settings)
        return Conversation(self.model, self.config.changed(chosen))

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
    return prepare(settings, notify, reads, cancel).load(notify, cancel)


def prepare(
    settings: Settings,
    notify: Callable[[str], None] | None = None,
    reads: Callable[..., int] | None = None,
    cancel: Event | None = None,
    freed: int = 0,
) -> "Prepared":
    """Find, check and plan a model, and read none of its weights.

    Args:
        reads: counts the tokens to be read, given `tokenizer` and `max_context`; raises
            ContextError if they are too many. By default some thousand are planned for.
        freed: bytes of the device that will be given back before it is loaded.

    Raises:
        ContextError: more is to be read than the model was trained for.
        ModelError: it cannot be found or run.
        SettingError: a setting is unknown or out of range, or nothing fits by the plan.
        Stopped: `cancel` was set.
    """
    config = require_meanings(settings)
    devices = choose_devices(settings.device)
    folder = find_model(settings.model, notify, cancel)
    planner = planner_here(
        config, folder, devices, reads_text=reads is not None, freed=freed, cancel=cancel
    )
    tokenizer = planner.forecaster.tokenizer
    asked = None
    if reads is not None and tokenizer is not None:
        tokenizer.chat_template = config.chat_template or tokenizer.chat_template
        asked = reads(tokenizer=tokenizer, max_context=planner.shape.max_context)
    _require_fit(planner, config, asked)
    tokens = TOKENS if asked is None else asked
    most = planner.shape.max_context - settings.planned_tokens
    plan = _planned(planner, max(1, min(tokens, most)))
    if plan is not None and not plan.fits and reads is None:
        plan = _planned(planner, max(1, min(FEW, most)))  # nobody said how much will be read
    if plan is not None and not plan.fits:
        raise refusal(plan)
    prepared = Prepared(folder, devices, planner, plan)
    if prepared.untested:
        prepared.require_plain()
    return prepared


@dataclass(frozen=True)
class Prepared:
    """A model that was found, checked and planned, and is not loaded."""

    folder: Path
    devices: Sequence[torch.device]
    planner: Planner
    plan: Plan | None

    @property
    def settings(self) -> Settings:
        """As given."""
        return self.planner.settings

    @property
    def choice(self) -> Choice:
        """How it will be loaded and used."""
        return self.planner.usual() if self.plan is None else self.plan.choice

    @property
    def untested(self) -> bool:
        """Whether kvlite was not tested with its kind."""
        return architecture(self.planner.shape.model_type) is UNTESTED

    def require_plain(self) -> None:
        """Raises SettingError if an untested model could not be checked once it is loaded."""
        choice, planner = self.choice, self.planner
        about = (
            f"{self.settings.model} is a {planner.shape.model_type!r} model, which kvlite was not "
            "tested with"
        )
        if choice.stream != "off":
            raise SettingError(
                f"{about} and cannot check while weights are streamed: use --stream off, or a "
                "smaller model"
            )
        quantizes = choice.weights.name not in PLAIN and not choice.weights.stored
        if quantizes and planner.held.experts:
            raise SettingError(
                f"{about}: its experts cannot become {choice.weights.name}, use --weights bf16 or "
                "a smaller model"
            )

    def load(
        self, notify: Callable[[str], None] | None = None, cancel: Event | None = None
    ) -> Runner:
        """Read its weights. Raises ModelError if it cannot be loaded or run, and Stopped if
        `cancel` was set."""
        devices, plan, choice = self.devices, self.plan, self.choice
        config = choice.decided(self.planner.config)
        settings = config.settings
        shape, forecaster = self.planner.shape, self.planner.forecaster
        for each in devices:
            hold(each, config.vram)
        planned = () if plan is None or choice.stream != "off" else plan.cards
        counts = [each.layers for each in planned]
        cards = [card for card, count in zip(devices, counts, strict=False) for _ in range(count)]
        groups = zip(cards, shape.layer_groups, strict=bool(cards))
        own = [card for card, group in groups for _ in group]
        whole = partial(open_whole, cards=own, cancel=cancel, notify=notify)
        opened, streams = STREAMED.get(choice.stream, (whole, None))
        model = load_model(
            self.folder,
            device=devices[0],
            weights=choice.weights,
            cards=cards,
            calibration=forecaster.calibration,
            tokenizer=forecaster.tokenizer,
            opened=opened,
            cancel=cancel,
        )
        if streams is not None:
            model.layers = streams(model, LEAST if plan is None else plan.resident)
        if streams is None and has_triton(model.device) != forecaster.on_cpu:
            model.forecasts = forecaster.model(choice.weights).forecasts
        use_chat_template(model, config.chat_template)
        if plan is not None and plan.mtp:
            plan = _with_mtp(model, plan)
        if choice.weights.stored and not choice.weights.keeps_experts_packed(shape.model_type):
            require_own_answers(model)
        if self.untested:
            require_own_answers(model, untested=True)
            if notify is not None:
                notify(
                    f"{settings.model} was not tested with kvlite; its first tokens were checked "
                    "against transformers"
                )
        if model.tokenizer.chat_template is None and notify is not None:
            notify(
                f"{settings.model} has no chat template: it goes on with your text as it is; for "
                "answers take an instruction-tuned model"
            )
        return Runner(model, config, plan)


def _with_mtp(model: LoadedModel, plan: Plan) -> Plan:
    try:
        load_mtp(model)
        return plan
    except Exception as error:
        if not is_oom(error):
            raise
    # The error is gone here, and with its traceback what was read of the head.
    release_memory(model.device)
    return plan.without_mtp(plan.mtp)


def _require_fit(planner: Planner, config: EngineConfig, tokens: int | None) -> None:
    # Where nobody knows how many tokens will be read, answers may be shorter, too.
    planned, shape = config.settings.planned_tokens, planner.shape
    method = config.method.fitted(shape, planner.forecaster.calibration)
    seen = min(max(1, tokens or 1), shape.max_context)

    def budget(longest: int) -> int:
        itemsize = planner.load_options[0][1].dtype.itemsize
        return config.budget.resolve(shape, method, seen, longest, itemsize, config.kv_bits)

    try:
        average = budget(1 if tokens is None else planned)
    except SettingError:
        budget(planned)  # says how much that takes
        raise
    if average < seen:
        require_budget(method, average)
    layer_policies(method, shape, average, seen, bits=config.kv_bits)


def _planned(planner: Planner, tokens: int) -> Plan | None:
    # A turn that does not fit will say why; over several cards nothing is loaded without a plan.
    try:
        return planner.best(tokens)
    except (ForecastError, SettingError):
        if planner.room.cards:
            raise
        return None
