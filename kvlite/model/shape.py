"""A model's shape: everything memory depends on, read from its config, without its weights."""

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlite.errors import ModelError, reason

ADMITTED = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "mixtral",
    "qwen3_moe",
)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        model_type: the config's name for the architecture.
        layers, heads, kv_heads, head_dim, hidden, intermediate, vocab: as in the papers.
        max_context: tokens the model was trained to hold.
        windows: per layer, the tokens a sliding window shows (its own included), or None where
            the layer sees everything.
        parameters: count of weights by group: embedding, attention (all layers), mlp (all
            layers), norms, head (0 when tied to the embedding).
    """

    model_type: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    max_context: int
    windows: tuple[int | None, ...]
    parameters: dict[str, int]

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers that see everything; the ones a method may cut."""
        return tuple(i for i, window in enumerate(self.windows) if window is None)

    def weight_bytes(self, itemsize: int) -> dict[str, int]:
        """Bytes of each group of weights at `itemsize` bytes a number."""
        return {group: count * itemsize for group, count in self.parameters.items()}

    def entry_bytes(self, itemsize: int) -> int:
        """Bytes of one entry of one KV head: key, value, int32 position."""
        return 2 * self.head_dim * itemsize + 4

    def full_kv_bytes(self, tokens: int, itemsize: int, batch: int = 1) -> int:
        """Bytes of keys and values if all of `tokens` were kept, sliding windows respected."""
        entries = sum(min(tokens, window or tokens) for window in self.windows)
        return batch * entries * self.kv_heads * 2 * self.head_dim * itemsize


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json.

    Raises:
        ModelError: there is none, or it is not a JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{folder} is not a model folder: it has no config.json (give a folder saved by "
            "transformers, a .gguf file, or a Hugging Face id)"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} does not describe a model: it is not a JSON object")
    return config


def require_admitted(model_type: str | None, name: str) -> None:
    """Raises ModelError if the architecture is not one this engine is tested with."""
    if model_type not in ADMITTED:
        raise ModelError(
            f"{name} is a {model_type!r} model, which kvlite does not run: it runs "
            f"{', '.join(ADMITTED)}"
        )


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in `folder`, from its config.json alone.

    Raises:
        ModelError: the config is missing or broken, or its architecture is not admitted.
    """
    require_admitted(read_config(folder).get("model_type"), str(folder))
    from transformers import AutoConfig

    try:
        return shape_of(AutoConfig.from_pretrained(folder, local_files_only=True))
    except Exception as error:  # libraries fail in many ways over a stranger's file
        path = folder / "config.json"
        raise ModelError(f"{path} does not describe a model: {reason(error)}") from error


def shape_of(config: Any) -> ModelShape:
    """The shape a transformers config describes; weights are counted on the meta device."""
    layers = config.num_hidden_layers
    if layers < 1:
        raise ValueError(f"num_hidden_layers is {layers}")
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return ModelShape(
        model_type=config.model_type,
        layers=layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        max_context=_context(config),
        windows=_windows(config),
        parameters=_count(config),
    )


def _context(config: Any) -> int:
    """Tokens a model holds. YaRN's configs may state the length before stretching; others state
    the length after it."""
    stated: int = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "yarn":
        return stated
    original = rope.get("original_max_position_embeddings") or stated
    return max(stated, int(original * rope.get("factor", 1)))


def _windows(config: Any) -> tuple[int | None, ...]:
    """A window that is no shorter than the context never slides, and counts as none."""
    window: int | None = getattr(config, "sliding_window", None)
    layers: int = config.num_hidden_layers
    if not window or window >= config.max_position_embeddings:
        return (None,) * layers
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _count(config: Any) -> dict[str, int]:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(deepcopy(config))
    counts = dict.fromkeys(("embedding", "attention", "mlp", "norms", "head"), 0)
    for name, weight in model.named_parameters():
        counts[_group(name)] += weight.numel()
    return counts


def _group(name: str) -> str:
    if "embed_tokens" in name:
        return "embedding"
    if name.startswith("lm_head"):
        return "head"
    if "norm" in name:
        return "norms"
    return "attention" if "self_attn" in name else "mlp"
