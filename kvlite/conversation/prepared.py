"""A model that was found, checked and planned, before its weights are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event

import torch

from kvlite.config.settings import Settings
from kvlite.engine.selfcheck import require_own_answers
from kvlite.errors import ForecastError, SettingError
from kvlite.memory.device_budget import hold
from kvlite.memory.free import is_oom, release_memory
from kvlite.methods.budget import require_budget
from kvlite.methods.engine_config import EngineConfig, require_meanings
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.architectures import UNTESTED, architecture
from kvlite.model.devices import choose_devices
from kvlite.model.jinja_template import read_template
from kvlite.model.load import LoadedModel, load_model, use_chat_template
from kvlite.model.source import find_model
from kvlite.model.weights import PLAIN
from kvlite.offload.weights.experts import LEAST
from kvlite.offload.weights.loader import load_streamed, open_whole
from kvlite.offload.weights.mtp import load_mtp
from kvlite.planner.candidates import planner_here
from kvlite.planner.plan import Choice, Plan, Planner, refusal

# Tokens planned for if nobody says how many will be read; and the fewest that must fit.
TOKENS, FEW = 4096, 256


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
        settings, folder, devices, reads_text=reads is not None, freed=freed, cancel=cancel
    )
    tokenizer = planner.forecaster.tokenizer
    asked = None
    if reads is not None and tokenizer is not None:
        asked = reads(tokenizer=tokenizer, max_context=planner.shape.max_context)
    _require_fit(planner, config, asked)
    tokens = TOKENS if asked is None else asked
    most = planner.shape.max_context - settings.planned_tokens
    plan = _planned(planner, max(1, min(tokens, most)))
    if plan is not None and not plan.fits and reads is None:
        plan = _planned(planner, max(1, min(FEW, most)))  # nobody said how much will be read
    if plan is not None and not plan.fits:
        raise refusal(plan)
    prepared = Prepared(settings, folder, devices, planner, plan)
    if prepared.untested:
        prepared.require_plain()
    return prepared


@dataclass(frozen=True)
class Prepared:
    """A model that was found, checked and planned, and is not loaded."""

    settings: Settings
    folder: Path
    devices: Sequence[torch.device]
    planner: Planner
    plan: Plan | None

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
    ) -> tuple[LoadedModel, Plan | None]:
        """Read its weights; returns the model, and the plan as it came to be. Raises ModelError if
        it cannot be loaded or run, and Stopped if `cancel` was set."""
        settings, devices, plan, choice = self.settings, self.devices, self.plan, self.choice
        shape, forecaster = self.planner.shape, self.planner.forecaster
        for each in devices:
            hold(each, settings.vram)
        resident = LEAST if plan is None else plan.resident
        load = partial(load_streamed, choice.stream, resident=resident)
        if choice.stream == "off":
            counts = [] if plan is None else [each.layers for each in plan.cards]
            cards = [
                card for card, count in zip(devices, counts, strict=False) for _ in range(count)
            ]
            groups = zip(cards, shape.layer_groups, strict=bool(cards))
            own = [card for card, group in groups for _ in group]
            opened = partial(open_whole, cards=own, cancel=cancel, notify=notify)
            load = partial(load_model, cards=cards, opened=opened)
        model = load(
            self.folder,
            device=devices[0],
            weights=choice.weights,
            calibration=forecaster.calibration,
            tokenizer=forecaster.tokenizer,
            cancel=cancel,
        )
        use_chat_template(model, read_template(settings.chat_template))
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
        return model, plan


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
