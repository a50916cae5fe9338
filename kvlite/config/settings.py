"""What a user can set: each option's name, default, range and help, once.

Flags, environment variables, profiles and every front end's controls are made from `Settings`.
Nothing here imports torch, so that a front end can show its options at once."""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from numbers import Integral, Real
from typing import Any

from kvlite.errors import SettingError

EMBEDDED_MODEL = "smollm2-135m"
# The largest whole number a setting may be.
LARGEST = 2**63 - 1
# Settings that only take effect when a model is loaded.
LOADING = ("model", "chat_template", "device", "weights", "vram", "stream")


# Tokens of an answer that memory is planned for where nothing is said of its length, and at most
# where something is.
_PLANNED, _MOST_PLANNED = 256, 2048


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


_sampling = partial(_option, panel="Answer")


@dataclass(frozen=True)
class Settings:
    """The settings of one run, checked when they are made.

    Raises:
        SettingError: a value is out of its range.
    """

    model: str = _option(
        EMBEDDED_MODEL,
        "the embedded smollm2-135m, a folder, a .gguf file, one of Ollama's (ollama:NAME), or a "
        "Hugging Face id",
    )
    method: str = _option(
        "spans",
        "how the cache is compressed, e.g. full, snapkv, kvx:omega=8 (see `kvlite methods`)",
    )
    budget: str = _option(
        "auto",
        "entries each KV head keeps of what it reads, mean over layers, sink and window included: "
        "a number, a share of the prompt (25%), or bytes in all (64MiB); auto is everything while "
        "it fits, and then as much as does",
    )
    kv_bits: str = _option(
        "auto",
        "bits of each number in the cache: 8, 4 or 2, or keys and values apart (k8v4), the first "
        "few and the recent entries exact; 4g32 scales groups of 32 channels, not 64; kivi4 "
        "quantizes keys per channel, for methods that only append while answering; 16 leaves "
        "numbers as they are (32 bits on a CPU); auto is 16, or 8 where everything then fits",
    )
    recall: str = _option(
        "auto",
        "where all that was read is kept once some of it is dropped, so that each turn reads on as "
        "if nothing had been dropped and chooses anew: ram (host memory), disk (a temporary file), "
        "auto (ram if there is enough, else disk), or off, to forget",
        choices=("auto", "ram", "disk", "off"),
    )
    recall_bits: str = _option(
        "16",
        "bits of each number there: 16 (as in the model, 32 on a CPU), 8 or 4",
        choices=("16", "8", "4"),
    )
    recall_limit: str = _option(
        "auto", "host memory it may take, e.g. 8GiB; auto is half of what is free"
    )
    recall_entries: int = _option(
        128,
        "entries each KV head may bring back for every token of an answer, besides the first few "
        "and the recent ones; 0 recalls between turns only",
        low=0,
    )
    checkpoint_limit: str = _option(
        "auto",
        "host memory for going back (edit, regenerate, undo) without reading again, e.g. 2GiB; the "
        "oldest checkpoints are dropped first; auto is a quarter of what is free",
    )
    beyond_context: str = _option(
        "refuse",
        "when a conversation outgrows the model's trained context: refuse it, or compact: go on "
        "with what is in the cache, at new positions (context shift), and forget the rest",
        choices=("refuse", "compact"),
    )
    scores: str = _option(
        "device",
        "where entries are chosen by attention scores: host pools and sorts in host memory, "
        "host-softmax computes the softmax there too; the same entries are kept, with less memory "
        "of the device and more time",
        choices=("device", "host", "host-softmax"),
    )
    device: str = _option(
        "auto",
        "auto, cpu, cuda or cuda:N; several cards (cuda:0,cuda:1), or all, hold a model too large "
        "for one: layers in order, each card filled to the same share",
    )
    weights: str = _option(
        "auto",
        "data type of the weights; auto is gguf for a GGUF file (Q2_K to Q8_0, IQ4 and MXFP4 stay "
        "as they are, which loses nothing), that of a quantized checkpoint, else bf16 on a GPU and "
        "fp32 on a CPU; with gguf, int8, int4 and nf4 (4 bits) the cache is as with fp32 or bf16",
        choices=("auto", "fp32", "bf16", "fp16", "gguf", "int8", "int4", "nf4"),
    )
    chat_template: str = _option(
        "", "a file with a chat template in Jinja, in place of the model's own"
    )
    vram: str = _option(
        "auto",
        "device memory that may be used, e.g. 24GiB; auto is what is free; on a CPU a limit for "
        "live tensors, without those kept for recall",
    )
    stream: str = _option(
        "auto",
        "where weights of decoder layers are offloaded, to be loaded layer by layer, once for a "
        "prompt and once for every token: ram (host memory) or disk (the model's files); so a "
        "model larger than the device runs, slower; off loads them all; auto is off unless nothing "
        "else fits",
        choices=("auto", "off", "ram", "disk"),
    )
    chunk: int | None = _option(
        None,
        "tokens that pass through a layer together while reading; left out, 1024, or fewer if "
        "memory is short",
        low=1,
    )
    reserve_tokens: int | None = _option(
        None,
        "tokens of an answer that memory is planned for, and bytes of a --budget are reckoned for; "
        "a longer answer goes on while there is memory; left out, --max-tokens, 2048 at most, or "
        "else 256 (kvlite serve: 2048)",
        low=64,
    )
    never_lossy: bool = _option(
        False,
        "if memory runs out, end the answer rather than give up bits or entries of the cache; the "
        "conversation can go on",
    )
    measure: str = _option(
        "process",
        "what peak memory means: of the process (on CUDA its allocator), or of live tensors, "
        "counted exactly but slower",
        choices=("process", "tensors"),
    )
    ocr: bool = _option(
        False,
        "read scanned pages of a PDF, too, some seconds each (pip install 'kvlite[ocr]'); without "
        "it they are left out, which is said by page",
    )
    encoding: str = _option(
        "",
        "what text files are in that say nothing of it, such as windows-1254; left out, UTF-8, or "
        "the likeliest, which is said",
    )
    system: str = _sampling(
        "", "what the model is told first; empty leaves that to the model's template"
    )
    max_new_tokens: int | None = _sampling(
        None,
        "longest answer, in tokens; left out, an answer goes on until the model ends it or the "
        "context is full",
        low=1,
        flag="--max-tokens",
    )
    thinking: str = _sampling(
        "auto",
        "whether models that can do both reason before they answer; auto leaves that to the "
        "model's template",
        choices=("auto", "on", "off"),
    )
    reasoning_budget: int | None = _sampling(
        None, "the most tokens of reasoning; then the answer begins", low=0, high=LARGEST
    )
    temperature: float = _sampling(
        0.0, "0 always takes the most likely token; above 0, tokens are drawn", low=0, high=10
    )
    top_k: int = _sampling(
        0, "draw from the k most likely tokens, if --temperature is above 0; 0 for all", low=0
    )
    top_p: float = _sampling(
        1.0, "as --top-k, from the most likely tokens that make up p", low=0, high=1
    )
    min_p: float = _sampling(
        0.0, "as --top-k, without tokens less likely than p times the likeliest", low=0, high=1
    )
    repetition_penalty: float = _sampling(
        1.0, "above 1 makes tokens already seen less likely", low=0.01, high=10
    )
    presence_penalty: float = _sampling(
        0.0, "taken from the logits of tokens that the answer has already", low=-2, high=2
    )
    frequency_penalty: float = _sampling(
        0.0, "likewise, for each time that it has them", low=-2, high=2
    )
    logit_bias: tuple[str, ...] = _sampling(
        (), "ID:BIAS, added to the logit of a token, from -100 to 100; may be repeated"
    )
    seed: int | None = _sampling(
        None, "makes draws repeatable, if --temperature is above 0", low=0, high=LARGEST
    )
    speculate: str = _sampling(
        "off",
        "speculative decoding: tokens that followed the same words before, in the document or the "
        "conversation, or that the model's own MTP head says, if it is loaded with auto, are "
        "checked together with the next one: but for rounding the same answer; auto does so where "
        "it pays",
        choices=("auto", "off"),
    )
    stop: tuple[str, ...] = _sampling((), "end the answer before this text; may be repeated")
    schema: str = _sampling(
        "",
        "what an answer must follow, token by token: json for any JSON object, a JSON Schema, a "
        "file with one, or a grammar in llguidance's Lark",
    )

    def __post_init__(self) -> None:
        for name in OPTIONS:
            object.__setattr__(self, name, checked(name, getattr(self, name), flag_of(name)))

    @property
    def reading(self) -> dict[str, Any]:
        """What `read_document` is told of them."""
        return {"ocr": self.ocr, "encoding": self.encoding}

    @property
    def planned_tokens(self) -> int:
        """Tokens of an answer that memory is planned for. It may get longer."""
        if self.reserve_tokens is None:
            return min(self.max_new_tokens or _PLANNED, _MOST_PLANNED)
        return min(self.reserve_tokens, self.max_new_tokens or self.reserve_tokens)

    def longest_within(self, room: int) -> int:
        """Tokens at which an answer ends where the context has so much room."""
        return min(room, self.max_new_tokens or room)

    def replace(self, values: Mapping[str, Any]) -> "Settings":
        """These settings with some values changed.

        Raises:
            SettingError: an unknown name or a value out of range.
        """
        require_known(values)
        return dataclasses.replace(self, **values)

    def after_load(self, values: Mapping[str, Any]) -> "Settings":
        """As `replace`, once a model is loaded.

        Raises:
            SettingError: as `replace`, or a value differs that only takes effect on loading.
        """
        # auto stays what it was when the model was loaded.
        values = {name: v for name, v in values.items() if name not in LOADING or v != "auto"}
        changed = self.replace(values)
        for name in LOADING:
            if values.get(name, getattr(self, name)) != getattr(self, name):
                raise SettingError(
                    f"{name} {values[name]!r} cannot be changed once a model is loaded: "
                    f"start anew with {flag_of(name)}, or give it to kvlite.load"
                )
        return changed


OPTIONS = {option.name: option for option in dataclasses.fields(Settings)}


def flag_of(name: str) -> str:
    """The command line's flag for a setting."""
    return OPTIONS[name].metadata["flag"] or f"--{name.replace('_', '-')}"


def require_known(names: Iterable[str], where: str = "") -> None:
    """Raises SettingError, which begins with `where`, unless these are names of settings."""
    for name in names:
        if name not in OPTIONS:
            near = get_close_matches(name, OPTIONS, 1, cutoff=0.75)
            known = f"there is {', '.join(sorted(OPTIONS))}"
            hint = f"did you mean {near[0]}?" if near else known
            raise SettingError(f"{where}unknown setting {name!r}: {hint}")


def checked(name: str, value: Any, called: str) -> Any:
    """A setting's value, converted to its type.

    Args:
        called: what errors call the setting, such as `--top-k`.

    Raises:
        SettingError: the value has the wrong type or is out of range.
    """
    if isinstance(value, int) and value.bit_length() > 1000:  # too long for Python to print
        raise SettingError(f"{called} is out of range: it has thousands of digits")
    option = OPTIONS[name]
    about = option.metadata
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and not isinstance(value, int | float):  # numpy's, say
        value = int(value) if isinstance(value, Integral) else float(value)
    if is_number and option.type is str:
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
    fits = is_number and isinstance(value, int if whole else int | float)
    if not fits or not low <= value <= (LARGEST if high is None else high):
        unlimited = high is None and (not isinstance(value, int) or value <= LARGEST)
        limits = f"at least {low}" if unlimited else f"between {low} and {high or LARGEST}"
        raise SettingError(
            f"{called} {value!r} is out of range: it must be {limits}"
            + (", a whole number" if whole else "")
        )
    return value if whole else float(value)
