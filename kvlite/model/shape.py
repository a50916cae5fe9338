"""A model's shape: everything that memory depends on, from its config alone."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlite.cache import KVSize
from kvlite.errors import ModelError, reason
from kvlite.model.architectures import (
    ADMITTED,
    EXPANDS,
    architecture,
    experts_per_token,
    has_experts,
)
from kvlite.model.config_check import language_part, parsed, require_model_type, require_sound
from kvlite.model.kv_sizes import sizes_and_windows
from kvlite.model.recurrent_states import StateShape, state_shapes
from kvlite.model.window import LocalWindow

if TYPE_CHECKING:
    from kvlite.model.weights import Weights


@dataclass(frozen=True)
class Parts:
    """Weights of one kind and size.

    Attributes:
        group: embedding, attention, recurrent, mlp, norms or head.
        size: the shape of one.
        linear: whether they are matrices of linear layers within the decoder: these can be
            quantized.
        upcast: whether they are float32 where others are float16.
        count: how many there are.
    """

    group: str
    size: tuple[int, ...]
    linear: bool
    upcast: bool
    count: int

    def numbers(self) -> int:
        """The number of weights in all."""
        return self.count * prod(self.size)

    def nbytes(self, weights: "Weights") -> int:
        """Bytes in all, including scales and tables of quantized ones.

        int8 has a float32 scale per row. nf4 has 4 bits per number and an 8-bit scale for every 64;
        of these, a float32 scale for every 256, their float32 mean, and two tables of 16 and 256
        float32 ("QLoRA", section 3, as bitsandbytes lays it out). int4 has 4 bits per number, and
        a float16 scale and offset for every 32 inputs; matrices beside layers, and those whose
        inputs are no multiple of 32, are not packed. Experts are quantized each by itself, and
        those of one projection share a table.
        In MXFP4 32 numbers of 4 bits share a byte.
        """
        return self.count * self._nbytes_of_one(weights)

    def _nbytes_of_one(self, weights: "Weights") -> int:
        numbers, experts = prod(self.size), self.size[0] if self.experts else 1
        if self.experts and weights.name == "mxfp4":
            return numbers * 17 // 32
        within = self.linear and self.group != "embedding"
        if within and weights.name == "int4" and not self.size[-1] % 32:
            return numbers * 20 // 32
        if (self.linear or self.experts) and weights.name == "int8":
            return numbers + 4 * numbers // self.size[-1]
        if (self.linear or self.experts) and weights.name == "nf4":
            each = numbers // experts
            scales = ceil(each / 64)
            tables = 4 * (256 if self.experts else 16 + 256)
            return experts * (ceil(each / 2) + scales + 4 * (ceil(scales / 256) + 1)) + tables
        itemsize = 4 if self.upcast and weights.is_half else weights.dtype.itemsize
        return numbers * itemsize

    @property
    def experts(self) -> bool:
        """Whether each is a projection of all experts of a layer, `(experts, rows, columns)`."""
        return len(self.size) == 3 and self.group == "mlp"


# Without trust_remote_code transformers would ask on the terminal whether to run a file's code.
PLACE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
GROUPS = ("embedding", "attention", "recurrent", "mlp", "norms", "head")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        model_type: the config's name for the architecture.
        layers: those with attention, which have keys and values.
        heads, hidden, intermediate, vocab: as in the papers.
        max_context: tokens the model was trained to hold.
        kv_sizes: per layer, what it keeps of a token; alike in those that see everything, and in
            those with a window.
        windows: per layer, its window, or None where it sees everything.
        parts: the weights, by kind and size.
        rotary: per layer, whether queries and keys are rotated.
        alike: per layer, the first one of the same kind and size.
        layer_groups: per layer, the kinds of the model's own layers that run with it, with its own.
        states: per layer, what the recurrent ones among these keep.
        lenders: layers whose entries those behind the last layer attend to, too.
        chosen_experts: experts of a layer that a token is routed to, where there are any.
    """

    model_type: str
    layers: int
    heads: int
    hidden: int
    intermediate: int
    vocab: int
    max_context: int
    kv_sizes: tuple[KVSize, ...]
    windows: tuple[LocalWindow | None, ...]
    parts: tuple[Parts, ...]
    rotary: tuple[bool, ...]
    alike: tuple[int, ...]
    layer_groups: tuple[tuple[str, ...], ...] = ()
    states: tuple[tuple[StateShape, ...], ...] = ()
    lenders: tuple[int, ...] = ()
    chosen_experts: int = 0

    @property
    def kv_size(self) -> KVSize:
        """Of the layers that see everything; of all where none does."""
        return self.kv_sizes[next(iter(self.full_layers), 0)]

    @property
    def kv_heads(self) -> int:
        """As in the papers, of the layers that see everything."""
        return self.kv_size.heads

    @property
    def head_dim(self) -> int:
        """Likewise."""
        return self.kv_size.dim

    @property
    def window_sizes(self) -> tuple[int | None, ...]:
        """Per layer, the tokens that its window shows, or None where it sees everything."""
        return tuple(None if window is None else window.size for window in self.windows)

    @property
    def recurrent_layers(self) -> int:
        """Layers that keep a state of fixed size instead of keys and values."""
        return sum(map(len, self.states))

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of these states for one sequence, where the model's numbers have `itemsize`."""
        return sum(state.nbytes(itemsize) for own in self.states for state in own)

    @property
    def parameters(self) -> dict[str, int]:
        """Number of weights by group, over all layers; the head has 0 if tied to the embedding."""
        return self._by_group(Parts.numbers)

    def weight_bytes(self, weights: "Weights") -> dict[str, int]:
        """Exact bytes of each group of weights once loaded, except for checkpoints that were
        quantized before.

        Not counted: buffers (rotary frequencies), the 512-byte granularity of a GPU's allocator,
        and, on a CPU that multiplies bfloat16, a byte more for each of nf4's scales, which become
        bfloat16 at the first token.
        """
        if weights.index is not None:
            kinds = [kind for group in self.layer_groups for kind in group]
            return weights.index.weight_bytes(weights.dtype.itemsize, kinds)
        return self._by_group(lambda part: part.nbytes(weights))

    def _by_group(self, of: Callable[[Parts], int]) -> dict[str, int]:
        return {
            group: sum(of(part) for part in self.parts if part.group == group) for group in GROUPS
        }

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers without a window: those that a method may cut."""
        return tuple(i for i, window in enumerate(self.windows) if window is None)

    def full_kv_bytes(self, tokens: int, itemsize: int, batch: int = 1) -> int:
        """Bytes of keys and values of `tokens` if methods kept all; windows still drop."""
        numbers = sum(
            (tokens if window is None else window.entries(tokens)) * size.heads * size.numbers
            for window, size in zip(self.windows, self.kv_sizes, strict=True)
        )
        return batch * numbers * itemsize


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json, or that of its language model where it has other parts; checked if
    the architecture is admitted. Raises ModelError if there is none, or no model has such
    values."""
    path = folder / "config.json"
    try:
        config = language_part(parsed(path), path)
    except (FileNotFoundError, NotADirectoryError):
        raise ModelError(
            f"{folder} is not a model folder: it has no config.json (give a folder saved by "
            "transformers, a .gguf file, or a Hugging Face id)"
        ) from None
    kind = require_model_type(config, path)
    try:
        require_sound(config, path)
    except ModelError as error:
        if kind in ADMITTED:
            raise
        raise ModelError(f"kvlite was not tested with {kind!r} models: {error}") from None
    return config


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in `folder`, from its config.json alone. Raises as `described`."""
    return described(folder)[1]


def described(folder: Path) -> tuple[Any, ModelShape]:
    """transformers' config of the language model in `folder`, and its shape. Raises ModelError if
    the config is missing or broken, or its layers are of no kind that kvlite runs."""
    read_config(folder)
    try:
        config = transformers_config(folder).get_text_config()
        return config, shape_of(config)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    except Exception as error:  # libraries fail in many ways over a stranger's file
        # huggingface_hub's validators put what they found into the cause.
        why = error.__cause__ if isinstance(error.__cause__, Exception) else error
        path = folder / "config.json"
        raise ModelError(f"{path} does not describe a model: {reason(why)}") from error


def transformers_config(folder: Path) -> Any:
    """transformers' config of the model in `folder`, all parts of it."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, **PLACE)


def shape_of(config: Any) -> ModelShape:
    """The shape a transformers config describes; weights are counted on the meta device."""
    import torch

    from kvlite.model.transformers_lock import meta_module

    own = architecture(config.model_type)
    width: int | list[int] = getattr(config, own.width)
    layer_groups, module = own.layer_groups(config), meta_module(config, torch.bfloat16)
    numbers = own.attention_layers(layer_groups)
    rotary = tuple(own.rotates(config, number) for number in numbers)
    sizes, windows = sizes_and_windows(config, module, numbers)
    return ModelShape(
        model_type=config.model_type,
        layers=len(layer_groups),
        heads=config.num_attention_heads,
        hidden=config.hidden_size,
        intermediate=max(width) if isinstance(width, list) else width,
        vocab=config.vocab_size,
        max_context=_context(config),
        kv_sizes=sizes,
        windows=windows,
        parts=_parts(module, [kind for group in layer_groups for kind in group]),
        rotary=rotary,
        alike=_alike(module.model.layers, layer_groups, rotary),
        layer_groups=layer_groups,
        states=state_shapes(module, layer_groups, own.recurrent),
        lenders=tuple(sorted({*own.borrowed(config).values()})),
        chosen_experts=experts_per_token(config),
    )


def _alike(
    modules: Any, layer_groups: tuple[tuple[str, ...], ...], rotary: tuple[bool, ...]
) -> tuple[int, ...]:
    """As of `ModelShape`: layers of one kind may still differ in size, such as those with experts
    and those without."""
    kinds, own = [], iter(modules)
    for group, turns in zip(layer_groups, rotary, strict=True):
        weights = [each.parameters() for each in islice(own, len(group))]
        sizes = tuple(tuple(weight.shape) for part in weights for weight in part)
        kinds.append((group, turns, sizes))
    return tuple(kinds.index(kind) for kind in kinds)


def _context(config: Any) -> int:
    """Tokens a model holds. YaRN's configs may state the length before stretching, others state
    it after."""
    stated: int = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "yarn":
        return stated
    original = rope.get("original_max_position_embeddings") or stated
    return max(stated, int(original * rope.get("factor", 1)))


def _parts(model: Any, layer_kinds: list[str]) -> tuple[Parts, ...]:
    import torch

    head = model.get_output_embeddings()
    # Models with experts are quantized layer by layer; what is beside layers stays as it is.
    within = "model.layers." if has_experts(model.config.model_type) else ""
    linears = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and module is not head
        if name.startswith(within) and not name.endswith(EXPANDS)
    }
    upcast = model._keep_in_fp32_modules  # by transformers, where a model is loaded as float16
    kinds = Counter(
        (
            group_of(name, layer_kinds),
            tuple(weight.shape),
            name in linears,
            any(each in name for each in upcast),
        )
        for name, weight in model.named_parameters()
    )
    return tuple(Parts(*kind, count) for kind, count in kinds.items())


# What Gemma makes of embeddings before the layers, and of states behind them.
_BESIDE_LAYERS = ("model.per_layer_", "model.altup_")
# What transformers calls what is in the place of attention in recurrent layers.
_RECURRENT = ("linear_attn", "conv", "mamba")
# What a layer is that is of one part alone, by its kind.
_MIXERS = {"full_attention": "attention", "linear_attention": "recurrent"}


def group_of(name: str, layer_kinds: Sequence[str] = ()) -> str:
    """The group, of `GROUPS`, of a parameter by transformers' name, and by the kinds of layers that
    are of one part alone."""
    if "norm" in name:
        return "norms"
    if "embed" in name or name.startswith(_BESIDE_LAYERS):
        return "embedding"
    if name.startswith("lm_head"):
        return "head"
    if ".mixer." in name:
        return _MIXERS.get(layer_kinds[int(name.split(".")[2])], "mlp")
    if "self_attn" in name:
        return "attention"
    return "recurrent" if any(f".{part}." in name for part in _RECURRENT) else "mlp"
