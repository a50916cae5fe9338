"""Controls made from `Settings`, so that each setting is described once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from kvlite.config.environment import read_text
from kvlite.config.settings import OPTIONS, Settings, checked, flag_of
from kvlite.errors import SettingError
from kvlite.methods import METHODS
from kvlite.web.server_api import FIELDS, REASONS

from .words import WORDS

# What is in sight, before and after what matters most; and what is folded away, under what title.
FIRST, ANSWER = ("model", "vram"), ("system", "max_new_tokens", "temperature")
FOLDED: dict[str, tuple[str, ...]] = {
    "Cache and offloading": (
        *("method", "budget", "kv_bits", "recall", "recall_bits", "recall_limit"),
        *("recall_entries", "checkpoint_limit", "beyond_context", "scores", "never_lossy"),
    ),
    "Model and device": (
        *("weights", "device", "stream", "chat_template", "chunk", "reserve_tokens"),
        *("ocr", "encoding", "measure"),
    ),
    "Answer": (
        *("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
        *("thinking", "reasoning_budget", "frequency_penalty", "logit_bias", "seed", "speculate"),
        *("stop", "schema"),
    ),
}
# What a server is told.
_SERVED = ("model", "system", "logit_bias", "schema", *FIELDS, *REASONS)


@dataclass(frozen=True)
class Models:
    """The models to choose from.

    Attributes:
        listed: their names.
        others: whether others may be typed, and other files of this machine named: any folder, for
            instance.
        here: whether they run on this machine. If not, a server answers, and what it cannot be told
            or asked is not on the page.
    """

    listed: Sequence[str] = ()
    others: bool = True
    here: bool = True

    def may_use(self, model: str, first: str) -> bool:
        """Whether a model may be chosen; the one that was there at `first` always."""
        return self.others or model in (first, *self.listed)

    def may_set(self, name: str) -> bool:
        """Whether a setting makes a difference, and is for whoever looks at the page."""
        return (self.here or name in _SERVED) and (self.others or name != "chat_template")

    def require_own(self, settings: Settings, first: Settings) -> None:
        """Raises SettingError if settings name a model or a file that is neither listed nor what
        there was at `first`, and others may not be named."""
        for name, listed in (("model", self.listed), ("chat_template", ())):
            value = getattr(settings, name)
            if not self.others and value not in ("", getattr(first, name), *listed):
                raise SettingError(
                    f"{label_of(name)} {value[:100]} is not listed here, and only whoever starts "
                    f"the app can name others ({flag_of(name)}): leave it as it was"
                )


def label_of(name: str) -> str:
    """The label of a setting's control."""
    return WORDS[name][0]


def control(name: str, value: Any, models: Models) -> gr.components.Component:
    """The control of a setting."""
    option = OPTIONS[name]
    about = option.metadata
    common: dict[str, Any] = {
        "label": label_of(name),
        "info": WORDS[name][1],
        "elem_id": f"set-{name.replace('_', '-')}",
        "visible": models.may_set(name),
    }
    if name == "method":
        return gr.Dropdown([*METHODS], value=value, allow_custom_value=True, **common)
    if name == "model":
        names = list(dict.fromkeys([value, *models.listed]))
        if not models.here:
            common["info"] = "one of the server's"
        return gr.Dropdown(names, value=value, allow_custom_value=models.others, **common)
    if about["choices"]:
        return gr.Dropdown(list(about["choices"]), value=value, **common)
    if option.type is bool:
        return gr.Checkbox(value=value, **common)
    if isinstance(option.default, tuple):
        return gr.Textbox("\n".join(value), lines=2, placeholder="one a line", **common)
    if option.default is None:  # gradio's numbers cannot be left empty
        return gr.Textbox(shown_value(name, value), placeholder="auto", **common)
    if option.type is str:
        lines = 3 if name == "system" else 1
        return gr.Textbox(value, lines=lines, max_lines=10, **common)
    return gr.Number(value, precision=None if option.type is float else 0, **common)


def shown_value(name: str, value: Any) -> Any:
    """A setting's value for its control."""
    default = OPTIONS[name].default
    if isinstance(default, tuple):
        return "\n".join(value)
    return str("" if value is None else value) if default is None else value


def shown_values(settings: Settings) -> list[Any]:
    """The values of all settings for their controls, in order."""
    return [shown_value(name, getattr(settings, name)) for name in OPTIONS]


def values_of(names: Sequence[str], shown: Sequence[Any]) -> dict[str, Any]:
    """Settings' values from those of controls; raises SettingError if one is out of range."""
    return {name: _value(name, each) for name, each in zip(names, shown, strict=True)}


def _value(name: str, shown: Any) -> Any:
    option = OPTIONS[name]
    if isinstance(option.default, tuple):
        return tuple(line for line in (shown or "").splitlines() if line)
    if option.default is None:
        return read_text(name, shown, label_of(name)) if (shown or "").strip() else None
    if shown is None:
        raise SettingError(f"{label_of(name)} is empty: {option.default} is usual")
    whole = option.type is not float and isinstance(shown, float) and shown.is_integer()
    return checked(name, int(shown) if whole else shown, label_of(name))


def changed(values: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Those of the values that differ from the settings."""
    return {name: value for name, value in values.items() if getattr(settings, name) != value}
