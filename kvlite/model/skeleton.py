"""A transformers model without its weights, to be filled from files part by part."""

from pathlib import Path
from typing import Any

from kvlite.model.attention_interface import ATTENTION, register_attention
from kvlite.model.shape import transformers_config
from kvlite.model.transformers_lock import keeps_float32, making_modules
from kvlite.model.weights import Weights, hush_bitsandbytes


def empty_module(folder: Path, weights: Weights) -> Any:
    """The model in `folder`, with parameters on the meta device and buffers on the CPU."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, GenerationConfig

    register_attention()
    hush_bitsandbytes()
    config = transformers_config(folder).get_text_config()
    with making_modules(), init_empty_weights(include_buffers=False):
        module: Any = AutoModelForCausalLM.from_config(
            config, dtype=weights.dtype, attn_implementation=ATTENTION
        )
    for name, weight in module.state_dict(keep_vars=True).items():
        if keeps_float32(module, name, weights.is_half):
            weight.data = weight.data.float()
    if (folder / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return module
