"""A model on the meta device: its layers compute shapes, not numbers."""

from pathlib import Path
from typing import Any

from kvlite.model.attention_interface import ATTENTION, register_attention
from kvlite.model.calibration import Calibration
from kvlite.model.experts import experts_of, take_one_by_one
from kvlite.model.layers import Layers
from kvlite.model.load import LoadedModel
from kvlite.model.packing import pack
from kvlite.model.quantizing import quantize_experts
from kvlite.model.shape import ModelShape
from kvlite.model.transformers_lock import meta_module
from kvlite.model.weights import Weights
from kvlite.ops.device import has_triton


class Words:
    """Stands in for a tokenizer if only the number of tokens matters: one per word."""

    chat_template = None
    eos_token_id = None

    def encode(self, text: str, **_: Any) -> list[int]:
        """As many zeros as the text has words."""
        return [0] * len(text.split())


def meta_model(
    config: Any,
    shape: ModelShape,
    weights: Weights,
    *,
    tokenizer: Any = None,
    calibration: Calibration | None = None,
    streamed: bool = False,
    kernels: bool = False,
) -> LoadedModel:
    """A model on the meta device, for forecasts; one layer stands for all equal ones.
    `config` is transformers'. Of the weights, only the dtype matters, whether they are unpacked
    for products, whether layers are `streamed`, and whether the device has Triton's `kernels`."""
    register_attention()
    own = sum(map(len, shape.layer_groups[: max(shape.alike) + 1]))
    module = meta_module(config, weights.dtype, layers=own, attention=ATTENTION)
    module.eval().requires_grad_(False)
    if weights.packs:
        pack(module, weights)
    if weights.keeps_experts_packed(shape.model_type):
        quantize_experts(module, weights)
    for experts in experts_of(module) if streamed else ():
        take_one_by_one(experts)
    module.config.layer_types = getattr(config, "layer_types", None)
    model = LoadedModel(
        module, tokenizer or Words(), shape, Path(), weights, frozenset(), calibration
    )
    model.layers = Layers([model.layers[index] for index in shape.alike])
    model.plans_kernels = kernels
    return model


def meta_model_of(model: LoadedModel) -> LoadedModel:
    """A loaded model's copy on the meta device, made once."""
    if model.meta is None:
        model.meta = meta_model(
            model.module.config,
            model.shape,
            model.weights,
            tokenizer=model.tokenizer,
            calibration=model.calibration,
            kernels=has_triton(model.device),
        )
        model.meta.forecasts = model.forecasts
    return model.meta
