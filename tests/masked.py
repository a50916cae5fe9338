"""An oracle for compressed decoding: one dense forward in which every layer and head may see
only what the cache held at that moment."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from tests.conftest import parts_of

Held = list[list[list[set[int]]]]  # per step, layer and KV head: the positions attended to


def masked_logits(reference: Any, token_ids: Tensor, held: Held, prompt: int) -> Tensor:
    """Logits `(tokens - prompt + 1, vocab)` from the prompt's last row on.

    Args:
        token_ids: `(1, tokens)`.
        held: one item a decoded token, the rows after the prompt's.
    """
    return masked_run(reference, token_ids, held, prompt)[0]


def masked_run(
    reference: Any, token_ids: Tensor, held: Held, prompt: int
) -> tuple[Tensor, list[Tensor]]:
    """The logits, and what each layer attended to: `(query heads, tokens, tokens)`."""
    allowed: dict[int, Tensor] = {}
    count = token_ids.shape[1]
    layers, kv_heads = len(held[0]), len(held[0][0])
    for layer in range(layers):
        mask = torch.ones(count, count, dtype=torch.bool).tril().repeat(kv_heads, 1, 1)
        for step, rows in enumerate(held):
            for head in range(kv_heads):
                mask[head, prompt + step] = False
                mask[head, prompt + step, sorted(rows[layer][head])] = True
        allowed[layer] = mask
    logits, weighed = run_under(reference, token_ids, allowed)
    return logits[prompt - 1 :], weighed


def run_under(
    reference: Any,
    token_ids: Tensor,
    allowed: dict[int, Tensor],
    like: list[dict[int, int]] | None = None,
    begin: int = 0,
) -> tuple[Tensor, list[Tensor]]:
    """One dense forward under a mask of each layer, `(KV heads, tokens, tokens)`, True where seen:
    all logits, and what each layer attended to, `(query heads, tokens, tokens)`.

    From row `begin` on, KV heads of each layer may take another one's output, as `like` says.
    """
    weighed: dict[int, Tensor] = {}

    def attention(
        module: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        *,
        scaling: float,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        group = q.shape[1] // k.shape[1]
        logits = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * scaling
        layer = attending.index(module.layer_idx)
        seen = allowed[layer].repeat_interleave(group, 0)
        logits = logits.masked_fill(~seen, -torch.inf)
        if s_aux is not None:
            sinks = s_aux.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sinks], -1)
        weights = logits.softmax(-1)[..., : k.shape[2]]
        weighed[layer] = weights[0]
        out = weights @ v.repeat_interleave(group, 1)
        outs = out.view(out.shape[0], k.shape[1], group, *out.shape[2:])
        for head, other in (like[layer] if like else {}).items():
            outs[:, head, :, begin:] = outs[:, other, :, begin:]
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("masked-oracle", attention)
    model = AutoModelForCausalLM.from_config(
        deepcopy(reference.config), attn_implementation="masked-oracle"
    )
    model.load_state_dict(reference.state_dict())
    attending = [
        index for index, layer in enumerate(model.model.layers) if parts_of(layer, "attention")
    ]
    with torch.no_grad():
        logits: Tensor = model.eval()(token_ids, use_cache=False).logits[0]
    return logits, [weighed[layer] for layer in sorted(allowed)]
