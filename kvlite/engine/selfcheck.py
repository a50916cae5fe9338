"""Checks that a model gives the same logits layer by layer as by itself, if it is untested."""

import torch

from kvlite.engine.prefill import prefill
from kvlite.engine.step import decode_step
from kvlite.errors import ModelError, reason
from kvlite.memory.free import is_oom
from kvlite.methods.full import Full
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.attention_interface import ATTENTION
from kvlite.model.load import LoadedModel
from kvlite.model.weights import PLAIN

TOKENS, ANSWERED = 32, 4
TOLERANCE = 0.3
# Where weights are not quantized, of an architecture that nobody has tested.
UNTESTED = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


def require_own_answers(model: LoadedModel, *, untested: bool = False) -> None:
    """Compare the logits after a few tokens with those of the model's own forward pass: some are
    read, some answered one by one.

    They may differ by rounding: at most `TOLERANCE` of the logits' spread, root mean square. That
    is wide because 8-bit activations amplify it: with int8 weights SmolLM2's differ by up to 0.14,
    and by 0.1 between transformers' own two attention functions; embeddings that are half too
    large make them differ by 0.8.

    Args:
        untested: whether it is the architecture that is in question; with weights that are not
            quantized, less is then allowed.

    Raises:
        ModelError: they differ by more, or are no numbers; or the model fails.
    """
    name = model.weights.name
    fault, tolerance = f"the {name} weights in {model.path} do not run layer by layer", TOLERANCE
    remedy = "use the model they were made from"
    if untested:
        kind = model.shape.model_type
        fault = f"{model.path} is a {kind!r} model, which kvlite was not tested with and cannot run"
        remedy = "use another model"
        if name in PLAIN:
            tolerance = UNTESTED[model.dtype]
    try:
        error = _error(model)
    except Exception as failure:  # whatever a class does that nobody here knows
        if not untested or is_oom(failure):
            raise
        raise ModelError(f"{fault}: {reason(failure)}") from failure
    if not error <= tolerance:
        raise ModelError(f"{fault}: logits are {error:.1%} off those of transformers; {remedy}")


@torch.inference_mode()
def _error(model: LoadedModel) -> float:
    """How far logits are from those of transformers, of their spread."""
    vocab, shape = model.shape.vocab, model.shape
    ids = torch.linspace(0, vocab - 1, TOKENS, device=model.device).long()[None]
    model.module.set_attn_implementation("eager")
    try:
        theirs = model.module(ids, use_cache=False, logits_to_keep=ANSWERED + 1).logits[0].float()
    finally:
        model.module.set_attn_implementation(ATTENTION)
    read, cache = TOKENS - ANSWERED, model.empty_cache()
    policies = layer_policies(Full(), shape, TOKENS, read)
    rows = [prefill(model, cache, ids[:, :read], policies, reserve=ANSWERED)]
    rows += [decode_step(model, cache, token, policies) for token in ids[0, read:, None]]
    error = (torch.cat(rows) - theirs).square().mean().sqrt() / theirs.std()
    return float(error)
