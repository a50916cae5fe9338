"""Whether a model says layer by layer what it says by itself: asked of those that no test knows."""

import torch

from kvlite.engine.prefill import prefill
from kvlite.errors import ModelError
from kvlite.methods.full import Full
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.attention_interface import ATTENTION
from kvlite.model.load import LoadedModel

TOKENS = 32
TOLERANCE = 0.3


def require_own_answers(model: LoadedModel) -> None:
    """Compare the logits after a few tokens with those of the model's own forward pass.

    They may differ by rounding: at most `TOLERANCE` of the logits' spread, root mean square. That
    is wide because 8-bit activations amplify it: with int8 weights SmolLM2's differ by up to 0.14,
    and by 0.1 between transformers' own two attention functions; embeddings that are half too
    large make them differ by 0.8.

    Raises:
        ModelError: they differ by more, or are no numbers.
    """
    vocab = model.shape.vocab
    ids = torch.linspace(0, vocab - 1, TOKENS, device=model.device).long()[None]
    theirs = _own_logits(model, ids)
    policies = layer_policies(Full(), model.shape, TOKENS, TOKENS)
    ours = prefill(model, model.empty_cache(), ids, policies)
    error = ((ours - theirs).square().mean().sqrt() / theirs.std()).item()
    if not error <= TOLERANCE:
        raise ModelError(
            f"the {model.weights.name} weights in {model.path} do not run layer by layer: logits "
            f"are {error:.0%} off those of transformers; use the model they were made from"
        )


@torch.inference_mode()
def _own_logits(model: LoadedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits `(1, vocab)` float32 after `ids`, as transformers computes them."""
    model.module.set_attn_implementation("eager")
    try:
        logits: torch.Tensor = model.module(ids, use_cache=False, logits_to_keep=1).logits
    finally:
        model.module.set_attn_implementation(ATTENTION)
    return logits[:, -1].float()
