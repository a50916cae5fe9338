"""Whether a model fits a device, before it is loaded; and models that do."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import torch

from kvlite.config.checked_file import from_json
from kvlite.config.settings import Settings
from kvlite.config.units import readable
from kvlite.errors import KvliteError, sentence
from kvlite.methods.engine_config import EngineConfig
from kvlite.model.devices import choose_devices
from kvlite.model.source import find_config
from kvlite.model.transformers_lock import load_transformers, making_modules
from kvlite.model.weights import Weights
from kvlite.planner.candidates import open_planner, planner_here
from kvlite.planner.plan import Plan
from kvlite.planner.planner import Planner

# As models are published that are not quantized.
PUBLISHED = Weights("bf16", torch.bfloat16)
# Tokens that a model which is proposed has room for.
ENOUGH = 32_768


@dataclass(frozen=True)
class Fit:
    """Whether a text fits with a model.

    Attributes:
        plan: the best plan; None if there is none.
        flaw: the reason if there is none.
    """

    plan: Plan | None
    flaw: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values by name."""
        if self.plan is None:
            return {"flaw": self.flaw}
        made = self.plan
        return {
            "tokens": made.tokens,
            "fits": made.fits,
            "weights": made.choice.weights.name,
            "stream": made.choice.stream,
            "kv_bits": made.choice.kv_bits,
            "peak_bytes": made.peak_bytes,
            "device": made.room.name,
        }

    def line(self) -> str:
        """As a table cell."""
        if self.plan is None:
            return self.flaw
        made = self.plan
        if not made.fits:
            return f"{made.tokens:,} tokens do not fit"
        stream = made.choice.stream
        streamed = "" if stream == "off" else f", layers from {stream}"
        said = f"{made.choice.weights.name}{streamed}, {readable(made.peak_bytes)}"
        return f"{made.tokens:,} tokens fit ({said})"


def fit_of(settings: Settings, model: str, tokens: int) -> Fit:
    """Whether that many tokens fit with a model, also on a card that is not in this machine."""
    try:
        planner = open_planner(settings.replace({"model": model}))
        return Fit(planner.best(_within(planner, tokens)))
    except KvliteError as error:
        return Fit(None, sentence(error))


def plan_here(settings: Settings, tokens: int, freed: int = 0) -> Plan:
    """The best plan on this machine for that many tokens, or for the model's trained context.
    Works in any thread, even while a model is loading or answering.

    Args:
        freed: bytes of the device that this process would free first.

    Raises:
        KvliteError: as `find_config`, `planner_here` and `Planner.best`.
    """
    load_transformers()
    config = EngineConfig.from_settings(settings)
    folder, devices = find_config(settings.model), choose_devices(settings.device)
    with making_modules():
        planner = planner_here(config, folder, devices, reads_text=False, freed=freed)
        return planner.best(_within(planner, tokens))


@dataclass(frozen=True)
class Proposal:
    """A model on the hub that fits.

    Attributes:
        name: its Hugging Face id.
        nbytes: of its weights as published, which are downloaded.
    """

    name: str
    nbytes: int
    plan: Plan


def proposals(settings: Settings, cancel: Event | None = None) -> Iterator[Proposal]:
    """Models that fit a device as published, with a text of `ENOUGH` tokens, largest first.
    Their configs come with kvlite: nothing is downloaded.

    Raises:
        Stopped: `cancel` was set.
        KvliteError: there is no such device, or a setting is out of range.
    """
    known = from_json((files("kvlite.planner") / "proposed.json").read_bytes())
    for name, config in known.items():
        with TemporaryDirectory(prefix="kvlite-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            given = settings.replace({"model": folder, "weights": "auto", "stream": "off"})
            planner = open_planner(given, cancel=cancel)
            _, weights = planner.load_options[0]  # as they were published
            loaded = planner.shape.weight_bytes(weights)
            if sum(loaded.values()) > planner.room.tensors:
                continue
            plan = planner.best(_within(planner, ENOUGH))
            if plan.fits and plan.choice.weights == weights:
                published = planner.shape.weight_bytes(PUBLISHED)
                made = loaded if weights.stored else published
                yield Proposal(name, sum(made.values()), plan)


def _within(planner: Planner, tokens: int) -> int:
    return max(1, min(tokens, planner.shape.max_context - planner.settings.planned_tokens))
