"""The type of a model's weights: what a setting asks for, or what the checkpoint has.

Sources: "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale" (sections 3 and 4);
"QLoRA: Efficient Finetuning of Quantized LLMs" (section 3: NF4, double quantization).
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvlite.errors import SettingError
from kvlite.model.architectures import has_experts
from kvlite.model.gguf.index import GGUFIndex, read_index
from kvlite.model.shape import read_config

PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BLOCK = 64
# What experts of gpt-oss are published in.
MXFP4 = "mxfp4"

_NOISE = ("MatMul8bitLt: inputs will be cast", "Failed to load CPU gemm_4bit_forward")


@dataclass(frozen=True)
class Weights:
    """The type that weights are loaded as.

    Attributes:
        name: fp32, bf16, fp16, int8, int4, nf4, gguf, or a checkpoint's own quantization, such as
            gptq.
        dtype: of activations, of the cache, and of weights that are not quantized.
        stored: the checkpoint is quantized already.
        index: with gguf, the file, which has the weights as they stay.
    """

    name: str
    dtype: torch.dtype
    stored: bool = False
    index: GGUFIndex | None = field(default=None, repr=False)

    @property
    def packs(self) -> bool:
        """Whether layers are those of `model.packed_linear`."""
        return self.name in ("int4", "gguf")

    @property
    def is_half(self) -> bool:
        """Whether activations are float16, which overflows where bfloat16 does not."""
        return self.dtype == torch.float16

    def keeps_experts_packed(self, model_type: str) -> bool:
        """Whether a model of this architecture has experts that are kept packed, and unpacked one
        at a time; it is then opened layer by layer."""
        packed = self.name == MXFP4 if self.stored else self.name in ("int8", "nf4")
        return packed and has_experts(model_type)

    @property
    def numbers(self) -> str:
        """The type whose numbers these are: what another model's keys and values must come from to
        be gone on with."""
        exact = self.index is not None and self.dtype == torch.float32
        return "fp32" if exact else self.name

    @property
    def config(self) -> Any:
        """The quantization config for transformers; None if it is not to quantize."""
        if self.stored or self.name in PLAIN or self.packs:
            return None
        from transformers import BitsAndBytesConfig

        if self.name == "int8":
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=self.dtype,
        )


def choose_weights(setting: str, device: torch.device, folder: Path) -> Weights:
    """What `--weights` means on this device for the model in `folder`, by its config.

    `auto` is gguf for a GGUF file with packed weights, which stay as they are, else bfloat16 on a
    GPU (float16 if it has none) and float32 on a CPU. With quantized weights, activations have this
    type. Raises SettingError if the model cannot be loaded like that; ModelError if there is no
    config.
    """
    config = read_config(folder)
    stored = config.get("quantization_config")
    if stored:
        name = stored_name(stored)
        if setting != "auto":
            raise SettingError(
                f"--weights {setting} cannot be had of {folder}, whose weights are {name} "
                "already: leave --weights out, or name the model they were made from"
            )
        return Weights(name, _natural_dtype(device), stored=True)
    if setting in PLAIN:
        return Weights(setting, PLAIN[setting])
    dtype, kernels = _natural_dtype(device), "numba" if device.type == "cpu" else "triton"
    if setting in ("auto", "gguf"):
        index = read_index(folder)
        if index is not None and index.is_quantized and find_spec(kernels) is not None:
            return Weights("gguf", dtype, index=index)
        if setting == "auto":
            return Weights(next(name for name in PLAIN if PLAIN[name] == dtype), dtype)
        if index is None or not index.is_quantized:
            raise SettingError(
                f"--weights gguf keeps weights as a GGUF file has them, and {_source(folder)} has "
                "none that can be multiplied so: leave --weights out"
            )
    if setting == "int4" and has_experts(config["model_type"]):
        raise SettingError(
            f"--weights int4 would leave the experts of {_source(folder)} as they are, which is "
            f"nearly all of a {config['model_type']!r} model: use nf4"
        )
    if setting in ("int4", "gguf"):
        if find_spec(kernels) is None:
            needed = "'numba>=0.66,<0.70'" if kernels == "numba" else "triton"
            raise SettingError(
                f"--weights {setting} needs {kernels}, which is not installed: run `pip install "
                f"{needed}`, or use {'fp32' if kernels == 'numba' else 'bf16'}"
            )
        return Weights(setting, dtype)
    if find_spec("bitsandbytes") is None:
        raise SettingError(
            f"--weights {setting} needs bitsandbytes, which is not installed: run "
            "`pip install 'bitsandbytes>=0.50,<0.51'`, or use bf16"
        )
    return Weights(setting, dtype)


def _source(folder: Path) -> Path:
    index = read_index(folder)
    return folder if index is None else index.path


def stored_name(stored: Any) -> str:
    """The name of a checkpoint's quantization: kvlite's for bitsandbytes, else its own."""
    about = stored if isinstance(stored, dict) else {}
    if about.get("load_in_4bit"):
        return str(about.get("bnb_4bit_quant_type", "fp4"))
    if about.get("load_in_8bit"):
        return "int8"
    return str(about.get("quant_method", "of an unknown kind"))


def _natural_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    return (
        torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    )


def hush_bitsandbytes() -> None:
    """Hide two of its warnings, which come with every product; harmless to repeat."""
    for name in ("bitsandbytes.autograd._functions", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).addFilter(_is_no_noise)


def _is_no_noise(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NOISE)


def keep_odd_sizes_unpacked(module: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights of odd sizes. On a CPU that multiplies
    bfloat16 it does so at the first token, and fails if sizes are no multiples of its blocks."""
    part: Any
    for part in module.modules():
        if hasattr(part, "support_avx512bf16_for_cpu"):
            outputs, inputs = part.out_features, part.in_features
            fits = outputs % 32 == 0 and inputs % BLOCK == 0
            part.support_avx512bf16_for_cpu = part.support_avx512bf16_for_cpu and fits


def held_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Everything in memory for a module: parameters, buffers, and the scales and tables that
    bitsandbytes keeps beside them. Some come twice, as views of the same storage."""
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        weight = getattr(part, "weight", None)
        scales = getattr(weight, "quant_state", None)
        nested, state = getattr(scales, "state2", None), getattr(part, "state", None)
        for owner in (weight, scales, nested, state):
            values = getattr(owner, "__dict__", {}).values()
            yield from (value for value in values if isinstance(value, Tensor))
