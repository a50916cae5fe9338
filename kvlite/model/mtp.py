"""A model's own MTP head (multi-token prediction): one more decoder layer, which goes on from what
the model makes of a token and from the token that followed it.

Source: "DeepSeek-V3 Technical Report" (2024), section 2.2, as transformers builds it. One layer,
trained to say the token after the next, says further ones of what it made itself.
"""

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from kvlite.model.architectures import architecture
from kvlite.model.shape import Parts
from kvlite.model.transformers_lock import making_modules

if TYPE_CHECKING:
    from kvlite.model.weights import Weights

# What checkpoints call the parts of transformers' layer.
_STORED = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "mtp_block": "mtp.layers.0",
    "post_norm": "mtp.norm",
}


def has_mtp(config: Any) -> bool:
    """Whether a checkpoint with transformers' `config` has such a head of one layer."""
    key = architecture(config.model_type).mtp
    return bool(key) and getattr(config, key, 0) == 1


def empty_mtp(module: Any, dtype: torch.dtype) -> Any:
    """The head of a transformers model that has one, in `dtype` on the meta device."""
    from transformers.modeling_layers import MtpLayer

    config, layer = deepcopy(module.config), module.model.layers[0]
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    with making_modules(), torch.device("meta"):
        head: Any = MtpLayer(config, type(layer), type(module.model.norm), 0)
    for parameter in head.parameters():
        parameter.data = parameter.data.to(dtype)
    return head.eval().requires_grad_(False)


def stored_name(name: str) -> str:
    """What a checkpoint calls a parameter of the head."""
    part, _, rest = name.partition(".")
    return f"{_STORED[part]}.{rest}"


def mtp_bytes(head: Any, weights: "Weights") -> int:
    """Bytes of a head on the meta device, once it is loaded like the model's layers."""
    shapes = [tuple(parameter.shape) for parameter in head.parameters()]
    parts = (Parts("mlp", shape, len(shape) == 2, False, 1) for shape in shapes)
    return sum(part.nbytes(weights) for part in parts)
