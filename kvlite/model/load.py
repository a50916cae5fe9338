"""Weights and tokenizer in memory, and the parts of a model the engine runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor

from kvlite.cache import KVCache, LayerCache
from kvlite.errors import ModelError, Stopped, reason
from kvlite.model.answers.derive import answer_form
from kvlite.model.answers.form import AnswerForm
from kvlite.model.answers.thinking import has_switch, spelled_in
from kvlite.model.architectures import LANGUAGE_WEIGHTS, architecture
from kvlite.model.attention_interface import ATTENTION, register_attention
from kvlite.model.calibration import Calibration
from kvlite.model.cpu import split_linears
from kvlite.model.end_of_turn import stop_ids
from kvlite.model.experts import take_few_in_place
from kvlite.model.gemma import Carried
from kvlite.model.grammar import Vocabulary
from kvlite.model.hybrid import engine_layers
from kvlite.model.jinja_template import source_of
from kvlite.model.latents import keep_latents
from kvlite.model.layers import Layers
from kvlite.model.llama4 import tell_positions
from kvlite.model.shape import PLACE, ModelShape, described, transformers_config
from kvlite.model.step_layers import StepLayer, step_layers
from kvlite.model.transformers_lock import loading, making_modules
from kvlite.model.weights import Weights, held_tensors, hush_bitsandbytes, keep_odd_sizes_unpacked
from kvlite.ops.compile_ahead import begin_compiling
from kvlite.ops.device import has_triton
from kvlite.ops.loops import Loops


@dataclass
class LoadedModel:
    """A transformers model taken apart for a layer-by-layer loop.

    Attributes:
        module: the whole model, which owns the weights.
        tokenizer: its tokenizer.
        shape: its sizes.
        path: the folder its safetensors came from.
        weights: what they were loaded as.
        stop_ids: tokens that end an answer.
        calibration: measurements for methods that need them, if there are any.
        layers: the decoder layers.
        carried: what goes from one to the next, where that is more than a hidden state.
        meta: the same model without weights, once a forecast needed it.
        forecasts: of first turns, which the same model without weights has, too
            (`planner.forecast`).
        plans_kernels: of such a model, whether its plan is for a device with Triton's kernels.
        mtp: its own head that does, if it was loaded (`model.mtp`).
        cards: the device of each layer, where they lie on several; none where all are on one. All
            else of the model is on the first.
    """

    module: Any
    tokenizer: Any
    shape: ModelShape
    path: Path
    weights: Weights
    stop_ids: frozenset[int]
    calibration: Calibration | None = None
    cards: tuple[torch.device, ...] = ()
    layers: Layers = field(init=False)
    carried: Carried | None = field(init=False)
    meta: "LoadedModel | None" = field(default=None, init=False, repr=False)
    forecasts: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    plans_kernels: bool = field(default=False, init=False)
    mtp: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        own = architecture(self.shape.model_type)
        self.carried = Carried(self.module.model) if own.carries else None
        self.layers = Layers(engine_layers(self.module.model, self.carried, self.shape))
        if has_triton(self.device):
            take_few_in_place(self.module)
        for layer in self.layers.modules:
            if own.latent:
                keep_latents(layer.self_attn, ATTENTION)
            if own.chunked:
                tell_positions(layer)
            if own.angles != "halves":
                with_own_table = partial(_with_own_table, own.angles)
                layer.self_attn.register_forward_pre_hook(with_own_table, with_kwargs=True)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Its tokens, for answers that follow a grammar. Errors are those of `Vocabulary`."""
        return Vocabulary(self.tokenizer, self.shape.vocab, self.stop_ids)

    @cached_property
    def answer_form(self) -> AnswerForm:
        """How it writes reasoning, and calls of tools, by its chat template."""
        if source_of(self.tokenizer) is None:
            return AnswerForm()
        ends = self.tokenizer.convert_ids_to_tokens(sorted(self.stop_ids))
        return answer_form(self.tokenizer, [each for each in ends if each])

    @cached_property
    def has_switch(self) -> bool:
        """Whether its chat template can be told to reason or not."""
        return source_of(self.tokenizer) is not None and has_switch(self.tokenizer)

    @cached_property
    def spelled(self) -> Mapping[int, str]:
        """Special tokens that stand around or within reasoning and calls."""
        return spelled_in(self.answer_form, self.tokenizer, self.stop_ids)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        # The module would look through all of them.
        device: torch.device = self.final_norm.weight.device
        return device

    @property
    def devices(self) -> Sequence[torch.device]:
        """Of each layer."""
        return self.cards or [self.device] * self.shape.layers

    @property
    def all_devices(self) -> tuple[torch.device, ...]:
        """Those that hold any of it, the first one first."""
        return tuple(dict.fromkeys((self.device, *self.cards)))

    def device_of(self, index: int) -> torch.device:
        """Where a layer is, with all that is kept for it; what enters it has to come there."""
        return self.cards[index] if self.cards else self.device

    def by_layer(self, tensor: Tensor) -> list[Tensor]:
        """A tensor for each layer, where that is; one copy for each device."""
        copies = {card: tensor.to(card) for card in {*self.cards}}
        return [copies[card] for card in self.cards] or [tensor] * self.shape.layers

    @property
    def final_norm(self) -> Any:
        """What norms the last layer's output."""
        return getattr(self.module.model, architecture(self.shape.model_type).final_norm)

    @property
    def dtype(self) -> torch.dtype:
        """The activations' type, and the cache's; weights may be quantized, embeddings are not."""
        if self.weights.packs:
            return self.weights.dtype
        dtype: torch.dtype = self.module.get_input_embeddings().weight.dtype
        return dtype

    def step_layer(self, index: int) -> StepLayer:
        """What does a layer's work for one token a sequence; called like the layer. Where layers
        are streamed, it may be used until the next one is accessed."""
        if self.layers.passing is not None:
            return self.layers[index]  # type: ignore[no-any-return]
        if self.layers.for_steps is None:
            self.layers.for_steps = step_layers(
                self.layers.modules, self.rotations(1, 1), self.shape.kv_heads
            )
        return self.layers.for_steps[index]

    def tensors(self) -> Iterator[Tensor]:
        """Everything on the device for it; some twice, as views of one storage."""
        yield from held_tensors(self.module)
        yield from self.layers.tensors()
        if self.mtp is not None:
            yield from held_tensors(self.mtp)

    def empty_cache(self, batch: int = 1) -> KVCache:
        """An empty cache for sequences of this model."""
        return KVCache(
            [
                LayerCache.empty(size, dtype=self.dtype, device=device, batch=batch)
                for size, device in zip(self.shape.kv_sizes, self.devices, strict=True)
            ]
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states `(batch, n, hidden)` of token ids `(batch, n)`."""
        hidden: Tensor = self.module.get_input_embeddings()(token_ids)
        if self.carried is not None:
            return self.carried.begin(token_ids, hidden)
        multiplier = getattr(self.module.config, "embedding_multiplier", None)
        return hidden if multiplier is None else hidden * multiplier

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits `(batch, vocab)` float32 of last hidden states `(batch, hidden)`, on
        the device of any layer."""
        hidden = hidden.to(self.device)
        if self.carried is not None:
            hidden = self.carried.end(hidden)
        logits: Tensor = self.module.lm_head(self.final_norm(hidden)).float()
        config = self.module.config
        scale = getattr(config, "logit_scale", 1) / getattr(config, "logits_scaling", 1)
        if scale != 1:
            logits = logits * scale
        cap = getattr(config, "final_logit_softcapping", None)
        return logits.div(cap).tanh().mul(cap) if cap else logits

    def rotations(self, start: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """cos and sin, each `(1, count, dim)`, of positions from `start`, for every layer.

        One call covers the whole range, so that frequencies that depend on the length (dynamic,
        longrope) are the same for every chunk.
        """
        return self.rotations_at(torch.arange(start, start + count, device=self.device), self.dtype)

    def rotations_at(self, positions: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Like `rotations`, for any positions `(n,)`; the largest decides the frequencies. Layers
        without rotary positions have tables that turn nothing. Tables have each angle for both
        halves of a head."""
        tables = self._tables(positions, dtype)
        if not self.cards:
            return tables
        distinct = {id(cos): (cos, sin) for cos, sin in tables}
        copies = {
            key: [*zip(self.by_layer(cos), self.by_layer(sin), strict=True)]
            for key, (cos, sin) in distinct.items()
        }
        return [copies[id(cos)][index] for index, (cos, _) in enumerate(tables)]

    def _tables(self, positions: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        rotary, layers = getattr(self.module.model, "rotary_emb", None), self.shape.layers
        like = torch.empty(0, dtype=dtype, device=self.device)
        if rotary is None:
            cos = like.new_ones(1, len(positions), self.shape.head_dim)
            return [(cos, torch.zeros_like(cos))] * layers
        kinds = getattr(self.module.config, "layer_types", None)
        if kinds is None or not isinstance(getattr(rotary, "rope_type", None), dict):
            tables = [rotary(like, positions[None])] * layers
        else:
            by_kind = {kind: rotary(like, positions[None], kind) for kind in set(kinds)}
            tables = [by_kind[kind] for kind in kinds[:layers]]
        angles = architecture(self.shape.model_type).angles
        if angles != "halves":
            own: Any = tables[0]
            if angles == "complex":
                own = own.real.to(dtype), own.imag.to(dtype)
            step = 2 if angles == "pairs" else 1
            cos, sin = (torch.cat([each[..., ::step]] * 2, -1) for each in own)
            tables = [(cos, sin)] * layers
        if all(self.shape.rotary):
            return tables
        cos, sin = tables[0]
        still = torch.ones_like(cos), torch.zeros_like(sin)
        return [
            table if turns else still
            for table, turns in zip(tables, self.shape.rotary, strict=True)
        ]


def _with_own_table(
    angles: str, attention: Any, args: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the engine gives an attention module, its rotary tables as that has them."""
    if "kvlite" not in given:  # transformers runs its model itself
        return args, given
    cos, sin = (
        each[..., : each.shape[-1] // 2].repeat_interleave(2 if angles == "pairs" else 1, -1)
        for each in given["position_embeddings"]
    )
    own = torch.complex(cos.float(), sin.float()) if angles == "complex" else (cos, sin)
    return args, {**given, "position_embeddings": own}


def load_model(
    folder: Path,
    *,
    device: torch.device,
    weights: Weights,
    cards: Sequence[torch.device] = (),
    calibration: Calibration | None = None,
    tokenizer: Any = None,
    opened: Callable[..., tuple[Any, dict[str, Any]]] | None = None,
    cancel: Event | None = None,
) -> LoadedModel:
    """Load safetensors from `folder`; nothing in it is executed. Raises Stopped if `cancel` was
    set; ModelError if files are missing, damaged or do not fit together, or a library that
    quantized weights need is not installed.

    Args:
        cards: of each layer, if `opened` puts them on several devices.
        tokenizer: its own, if it was read before.
        opened: replaces `load_module`; its decoder layers' weights may be elsewhere than on
            `device`.
        cancel: set to stop after the weight that is being read.
    """
    from transformers import AutoTokenizer

    config, shape = described(folder)
    if weights.index is not None:
        begin_compiling(device, Loops.PACKED, Loops.STEP)
    try:
        with without_progress_lines(), loading(cancel):
            if weights.stored and not weights.keeps_experts_packed(shape.model_type):
                _require_packed(config.quantization_config, weights, device)
            module, found = (opened or load_module)(folder, device=device, weights=weights)
            if tokenizer is None:
                tokenizer = AutoTokenizer.from_pretrained(folder, **PLACE)
    except Stopped:
        raise
    except Exception as error:  # libraries fail in many ways over a stranger's file
        raise ModelError(f"the model in {folder} cannot be loaded: {reason(error)}") from error
    require_whole(found, str(folder), exactly=weights.stored)
    if device.type == "cpu":
        split_linears(module)
    ends = stop_ids(module, tokenizer)
    model = LoadedModel(
        module, tokenizer, shape, folder, weights, ends, calibration, cards=tuple(cards)
    )
    if opened is None and device.type == "cuda":
        model.step_layer(0)  # weights are moved while there is room
        torch.cuda.empty_cache()
    return model


def load_module(
    folder: Path, *, device: torch.device, weights: Weights
) -> tuple[Any, dict[str, Any]]:
    """A transformers model, and transformers' loading info. Where a language model is one part of
    several, only its weights are read.

    Weights to be quantized come to the device one by one, so there is never a full copy.
    """
    from transformers import AutoModelForCausalLM

    register_attention()
    hush_bitsandbytes()
    # If this were None, transformers would forget the checkpoint's own quantization.
    given = {} if weights.config is None else {"quantization_config": weights.config}
    whole = transformers_config(folder)
    if (language := whole.get_text_config()) is not whole:
        given |= {"config": language, "key_mapping": LANGUAGE_WEIGHTS}
    with making_modules():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=weights.dtype,
            device_map={"": device},
            attn_implementation=ATTENTION,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **given,
            **PLACE,
        )
    module, found = loaded
    module.eval().requires_grad_(False)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # transformers reserves as much as all weights may need
    else:
        keep_odd_sizes_unpacked(module)
    return module, found


def _require_packed(stored: Any, weights: Weights, device: torch.device) -> None:
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(stored, pre_quantized=True)
    quantizer.validate_environment(device_map={"": device}, weights_only=True)
    if getattr(quantizer.quantization_config, "dequantize", False):
        raise ModelError(
            f"{weights.name} weights would be unpacked to full precision on this machine, use "
            "one with a GPU that computes with them, or the model they were made from"
        )


@contextmanager
def without_progress_lines() -> Iterator[None]:
    """Hide transformers' progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def require_whole(found: dict[str, Any], name: str, *, exactly: bool = False) -> None:
    """Raises ModelError if weights are missing or do not fit, by transformers' loading info:
    transformers would make them up. If `exactly`, also of weights without a place in the model:
    quantized ones would load without their scales and give nonsense."""
    misfits = {key for key, *_ in found["mismatched_keys"]}
    strangers = found["unexpected_keys"] if exactly else ()
    flaws = ("is missing", found["missing_keys"]), ("has another size", misfits)
    for flaw, keys in (*flaws, ("has no place in it", strangers)):
        if keys:
            raise ModelError(
                f"the weights of {name} do not fit its config: {min(keys)} {flaw} (one of "
                f"{len(keys)}); get the model again"
            )


def use_chat_template(model: LoadedModel, source: str) -> None:
    """Speak in another chat template, which may end answers with another token."""
    if source:
        model.tokenizer.chat_template = source
        model.stop_ids |= stop_ids(model.module, model.tokenizer)
