"""The judge of every step: transformers' own model, whose attention to each token of an answer is
dense, in float64 where it counts, over what the cache held for it."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from kvlite.cache import LayerCache
from tests.conftest import parts_of

NAME = "judge-of-steps"


@dataclass(frozen=True)
class Line:
    """What a KV head attends to.

    Attributes:
        positions, keys, values: `(entries,)`, `(entries, dim)` twice.
        asking: the KV head whose queries and keys it attends with.
    """

    positions: Tensor
    keys: Tensor
    values: Tensor
    asking: int

    def joined(self, newest: "Line") -> "Line":
        """These and the last entry of another."""
        at = newest.positions == newest.positions.max()
        parts = (
            torch.cat([own, other[at]])
            for own, other in zip(
                (self.positions, self.keys, self.values),
                (newest.positions, newest.keys, newest.values),
                strict=True,
            )
        )
        return Line(*parts, self.asking)

    def until(self, position: int) -> "Line":
        """Without what comes later."""
        at = self.positions <= position
        return Line(self.positions[at], self.keys[at], self.values[at], self.asking)


Lines = dict[int, Line]  # by KV head; one that another stands in for has none


def lines_of(layer: LayerCache) -> Lines:
    """Copies of what the KV heads of a layer hold, the restored numbers of what is quantized."""
    found: Lines = {}
    for group in layer.head_groups:
        held = slice(0, group.used)
        keys, values = group.keys[0, :, held].clone(), group.values[0, :, held].clone()
        positions = group.positions[0, :, held].long()
        for row, head in enumerate(group.heads):
            found[head] = Line(positions[row], keys[row], values[row], group.asking_heads[row])
    return found


@dataclass
class Judged:
    """What transformers says.

    Attributes:
        logits: `(tokens, vocab)`.
        keys, values: by layer, `(KV heads, tokens, dim)`, of each token.
        visible: by layer, `(tokens, tokens)`, what the model itself lets a token see.
    """

    logits: Tensor
    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    visible: dict[int, Tensor]


def lenders_of(config: Any) -> dict[int, int]:
    """Layers without keys (Gemma 3n, 4), and the last ones of their kind before them, to whose
    entries they attend."""
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    own = (config.num_hidden_layers - shared) if shared else 0
    kinds = config.layer_types[:own] if shared else []
    last = {kind: at for at, kind in enumerate(kinds)}
    return {own + at: last[config.layer_types[own + at]] for at in range(shared)}


def in_halves(vectors: Tensor, config: Any) -> Tensor:
    """Vectors whose rotated pairs lie in the two halves of what is rotated, as kvlite has them,
    where the model has them side by side. Their products are the same."""
    if config.model_type not in ("cohere2", "ernie4_5", "glm4", "llama4_text"):
        return vectors
    rope = getattr(config, "rope_parameters", None) or {}
    rotated = int(vectors.shape[-1] * rope.get("partial_rotary_factor", 1))
    order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, vectors.shape[-1])]
    return vectors[..., order]


def judged(
    reference: Any,
    ids: list[int],
    history: list[list[Lines]],
    aliases: list[dict[int, int]],
) -> Judged:
    """Run the model over all tokens, of which the last are an answer's.

    Args:
        history: for each token of the answer, what each layer attended to.
        aliases: for each layer, the KV heads that take another one's output.
    """
    lenders = lenders_of(reference.config)
    said = Judged(torch.empty(0), {}, {}, {})
    first = len(ids) - len(history)

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scaling: float, **more: Any
    ) -> tuple[Tensor, None]:
        layer = attending.index(module.layer_idx)
        kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        q, k = (in_halves(each, reference.config) for each in (q, k))
        said.keys[layer], said.values[layer] = k[0], v[0]
        seen = (mask if mask.dtype == torch.bool else mask > -1)[0, 0]
        said.visible[layer] = seen
        sinks, cap = more.get("s_aux"), more.get("softcap")

        def attend(queries: Tensor, keys: Tensor, values: Tensor, ahead: Any, head: int) -> Tensor:
            """One KV head's queries `(group, rows, dim)`; dense, and with nothing left out."""
            logits = queries @ keys.mT * scaling
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            if ahead is not None:
                logits = logits.masked_fill(ahead, -torch.inf)
            if sinks is not None:
                own = sinks.double()[head * group : (head + 1) * group]
                logits = torch.cat([logits, own[:, None, None].expand(*logits.shape[:2], 1)], -1)
            weights = logits.softmax(-1)[..., : keys.shape[-2]]
            return weights @ values

        asked = q[0].double().unflatten(0, (kv_heads, group))
        out = torch.stack(
            [
                attend(asked[head], k[0, head].double(), v[0, head].double(), ~seen, head)
                for head in range(kv_heads)
            ]
        )
        for number, layers in enumerate(history):
            row = first + number
            for head, line in layers[lenders.get(layer, layer)].items():
                # Latents are one head's, which the model spreads: there it lends its own numbers.
                apart = line.keys.shape[-1] == k.shape[-1]
                heads = [head] if apart else range(kv_heads)
                for each in heads:
                    keys, values = line.keys, line.values
                    if not apart:
                        keys, values = k[0, each, line.positions], v[0, each, line.positions]
                    asking = line.asking if apart else each
                    queries = asked[asking][:, row : row + 1]
                    out[each, :, row] = attend(queries, keys.double(), values.double(), None, each)[
                        :, 0
                    ]
            for head, other in aliases[lenders.get(layer, layer)].items():
                out[head, :, row] = out[other, :, row]
        return out.flatten(0, 1)[None].transpose(1, 2).to(q.dtype).contiguous(), None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    model = AutoModelForCausalLM.from_config(deepcopy(reference.config), attn_implementation=NAME)
    model.load_state_dict(reference.state_dict())
    layers = model.model.layers
    attending = [index for index, layer in enumerate(layers) if parts_of(layer, "attention")]
    with torch.no_grad():
        said.logits = model.eval()(torch.tensor([ids]), use_cache=False).logits[0]
    return said
