"""What a user can set: each option's name, default, range and help, once.

The command line's flags, environment variables, profiles, and every other front end's controls are
made from `Settings`. Nothing here imports torch, so that a segment end can show its options at
once."""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from kvlite.errors import SettingError

EMBEDDED_MODEL = "smollm2-135m"
# Of whole numbers.
LARGEST = 2**63 - 1
# Settings that only loading a model heeds.
LOADING = ("model", "device", "weights", "vram", "stream")


def _option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    flag: str = "",
    panel: str = "Model and memory",
) -> Any:
    about = {"help": help, "low": low, "high": high, "choices": choices, "flag": flag}
    return dataclasses.field(default=default, metadata={**about, "panel": panel})


def _sampling(default: Any, help: str, **about: Any) -> Any:
    return _option(default, help, panel="Answer", **about)


@dataclass(frozen=True)
class Settings:
    """One run's settings, checked when made.

    Raises:
        SettingError: a value is out of its range.
    """

    model: str = _option(
        EMBEDDED_MODEL,
        "the embedded smollm2-135m, a folder, a .gguf file, or a Hugging Face id",
    )
    method: str = _option(
        "spans",
        "how the cache is compressed, e.g. full, snapkv, kvx:omega=8 (see `kvlite methods`)",
    )
    budget: str = _option(
        "auto",
        "entries a KV head keeps of what it reads, mean over layers, sink and window included: a "
        "number, a share of the prompt (25%), or bytes in all (64MiB); auto is a quarter, but at "
        "least 1024",
    )
    kv_bits: str = _option(
        "auto",
        "bits a number of the cache has: 8, 4 or 2, or keys and values apart (k8v4), the first few "
        "and the recent entries exact; 4g32 scales groups of 32 channels, not 64; kivi4 holds keys "
        "channel by channel, for methods that only add while answering; 16 leaves numbers as they "
        "are (with 32 bits on a CPU); auto is 16, or 8 or 4 where memory is short",
    )
    recall: str = _option(
        "auto",
        "where everything that is read is kept once some of it is dropped, so that each turn reads "
        "on as if nothing had been and chooses anew what stays: ram (host memory), disk (a "
        "temporary file), auto (ram if there is enough, else disk), or off, to forget",
        choices=("auto", "ram", "disk", "off"),
    )
    recall_bits: str = _option(
        "16",
        "bits a number has there: 16 (as the model has it, 32 on a CPU), 8 or 4",
        choices=("16", "8", "4"),
    )
    recall_limit: str = _option(
        "auto", "host memory it may take, e.g. 8GiB; auto is half of what is free"
    )
    recall_entries: int = _option(
        128,
        "entries a KV head that each token of an answer may look for in all that was read, and "
        "bring back, beside the first few and the recent ones; 0 recalls between turns only",
        low=0,
    )
    checkpoint_limit: str = _option(
        "auto",
        "host memory for what it takes to edit, regenerate or undo without reading again, e.g. "
        "2GiB; the oldest goes first, and is read again if it is wanted; auto is a quarter of what "
        "is free",
    )
    beyond_context: str = _option(
        "refuse",
        "what becomes of a conversation that outgrows the context its model was trained for: it is "
        "refused, or goes on with what the cache holds then, moved together (compact): the rest is "
        "forgotten, and it is said",
        choices=("refuse", "compact"),
    )
    scores: str = _option(
        "device",
        "where attention becomes a choice of what is kept: host pools and sorts it in host memory, "
        "host-softmax forms it there too, from logits; the same entries are kept, and choosing "
        "takes less of the device's memory and more time",
        choices=("device", "host", "host-softmax"),
    )
    device: str = _option("auto", "auto, cpu, cuda or cuda:N")
    weights: str = _option(
        "auto",
        "what weights are kept in; auto is bf16 on a GPU, fp32 on a CPU, and what a quantized "
        "checkpoint has; int4 is for a CPU, which it answers faster on; with int8, int4 and nf4 (4 "
        "bits) the cache is as with auto",
        choices=("auto", "fp32", "bf16", "fp16", "int8", "int4", "nf4"),
    )
    vram: str = _option(
        "auto",
        "memory of the device that may be taken, e.g. 24GiB; auto is what is free; on a CPU live "
        "tensors may take that much, those kept for recall beside it",
    )
    stream: str = _option(
        "auto",
        "where decoder layers' weights stay, each to come to the device only when its turn comes, "
        "once for a prompt and once for every token: ram, in host memory, or disk, in the model's "
        "files; so a model larger than the device runs, slower; off loads all of them; auto is off "
        "unless nothing else fits",
        choices=("auto", "off", "ram", "disk"),
    )
    chunk: int | None = _option(
        None,
        "tokens that pass through a layer together while reading; left out, 1024, or less where "
        "memory is short",
        low=1,
    )
    never_lossy: bool = _option(
        False,
        "where memory runs out, give up nothing that could make an answer worse (bits and entries "
        "of the cache), and rather end it; the conversation can go on",
    )
    measure: str = _option(
        "process",
        "what peak memory means: of the process (on CUDA its allocator), or of live tensors, "
        "counted exactly but slower",
        choices=("process", "tensors"),
    )
    system: str = _sampling(
        "",
        "what the model is told before the conversation begins; empty leaves that to the model",
    )
    max_new_tokens: int = _sampling(256, "longest answer, in tokens", low=1, flag="--max-tokens")
    temperature: float = _sampling(0.0, "0 takes the likeliest token every time", low=0, high=10)
    top_k: int = _sampling(
        0, "draw from the k likeliest tokens, if --temperature is above 0; 0 for all", low=0
    )
    top_p: float = _sampling(
        1.0, "as --top-k, from the likeliest tokens that make up p", low=0, high=1
    )
    min_p: float = _sampling(
        0.0, "as --top-k, without tokens less likely than p times the likeliest", low=0, high=1
    )
    repetition_penalty: float = _sampling(
        1.0, "above 1 makes tokens already seen less likely", low=0.01, high=10
    )
    seed: int | None = _sampling(
        None, "makes draws repeatable, if --temperature is above 0", low=0, high=LARGEST
    )
    stop: tuple[str, ...] = _sampling((), "end the answer before this text; may be repeated")

    def __post_init__(self) -> None:
        for name in OPTIONS:
            object.__setattr__(self, name, checked(name, getattr(self, name), flag_of(name)))

    def replace(self, values: Mapping[str, Any]) -> "Settings":
        """These settings with some values changed.

        Raises:
            SettingError: an unknown name or a value out of range.
        """
        require_known(values)
        return dataclasses.replace(self, **values)

    def after_load(self, values: Mapping[str, Any]) -> "Settings":
        """These settings with some values changed, once a model is loaded.

        Raises:
            SettingError: as `replace`, or a value that only loading could heed.
        """
        # What is auto is as it was loaded.
        values = {name: v for name, v in values.items() if name not in LOADING or v != "auto"}
        changed = self.replace(values)
        for name in LOADING:
            if values.get(name, getattr(self, name)) != getattr(self, name):
                raise SettingError(
                    f"{name} {values[name]!r} cannot be changed once a model is loaded: "
                    "give it to kvlite.load"
                )
        return changed


OPTIONS = {option.name: option for option in dataclasses.fields(Settings)}


def flag_of(name: str) -> str:
    """What a setting is called on the command line."""
    return OPTIONS[name].metadata["flag"] or f"--{name.replace('_', '-')}"


def require_known(names: Iterable[str], where: str = "") -> None:
    """Check that these are names of settings.

    Args:
        where: what an error begins with, as in `file: `.

    Raises:
        SettingError: one is not.
    """
    for name in names:
        if name not in OPTIONS:
            raise SettingError(
                f"{where}unknown setting {name!r}: there is {', '.join(sorted(OPTIONS))}"
            )


def checked(name: str, value: Any, called: str) -> Any:
    """A setting's value as its type has it.

    Args:
        called: what the value is called where it was given, for the error: `--top-k`.

    Raises:
        SettingError: it is of another type, or out of range.
    """
    if isinstance(value, int) and value.bit_length() > 1000:  # Python writes only so many digits
        raise SettingError(f"{called} is out of range: it has thousands of digits")
    option = OPTIONS[name]
    about = option.metadata
    if isinstance(value, Real) and not isinstance(value, bool | int | float):  # numpy's, say
        value = int(value) if isinstance(value, Integral) else float(value)
    if option.type is str and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if about["choices"] and value not in about["choices"]:
        raise SettingError(f"{called} {value!r} is not one of {', '.join(about['choices'])}")
    if option.type is bool:
        if not isinstance(value, bool):
            raise SettingError(f"{called} {value!r} is not True or False")
        return value
    if option.type is str:
        if not isinstance(value, str | os.PathLike):
            raise SettingError(f"{called} {value!r} is not text")
        return str(value)
    if isinstance(option.default, tuple):
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, tuple | list) or not all(isinstance(t, str) for t in texts):
            raise SettingError(f"{called} {value!r} is not text, or several")
        return tuple(texts)
    if value is None and option.default is None:
        return value
    low, high, whole = about["low"], about["high"], option.type is not float
    if (
        not isinstance(value, int if whole else int | float)
        or isinstance(value, bool)
        or not low <= value
        or value > (LARGEST if high is None else high)
    ):
        unlimited = high is None and (not isinstance(value, int) or value <= LARGEST)
        limits = f"at least {low}" if unlimited else f"between {low} and {high or LARGEST}"
        raise SettingError(
            f"{called} {value!r} is out of range: it must be {limits}"
            + (", a whole number" if whole else "")
        )
    return value if whole else float(value)
