"""The logits after every token of a prompt, not only after the last."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvlite.engine.callbacks import NO_CALLBACKS, Callbacks
from kvlite.engine.prefill import Prefill
from kvlite.engine.slices import in_one_go
from kvlite.methods import METHODS
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.load import LoadedModel

# Rows of logits at once: a large vocabulary takes half a megabyte each.
_ROWS = 128


@torch.inference_mode()
def prompt_logits(
    model: LoadedModel, token_ids: Sequence[int], callbacks: Callbacks = NO_CALLBACKS
) -> Iterator[Tensor]:
    """Logits `(rows, vocab)` float32 of what follows each token, in order, from everything before
    it: nothing is dropped or rounded, and nothing of the reading is kept.

    Args:
        token_ids: at least one.
        callbacks: follow the reading and can cancel it.

    Raises:
        Stopped: it was cancelled.
    """
    count = len(token_ids)
    policies = layer_policies(METHODS["full"](), model.shape, count, count)
    ids = torch.tensor([[*token_ids]], device=model.device)
    reading = Prefill(model, model.empty_cache(), ids, policies, callbacks=callbacks, whole=True)
    for index in range(model.shape.layers):
        in_one_go(reading.read_layer(index))
    for start in range(0, count, _ROWS):
        yield model.logits(reading.hidden[0, start : start + _ROWS])
