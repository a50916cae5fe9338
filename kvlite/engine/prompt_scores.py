"""What a model makes of every token of a prompt, not of the next one alone."""

from collections.abc import Iterator, Sequence
from threading import Event

import torch
from torch import Tensor

from kvlite.engine.prefill import Prefill, Progress
from kvlite.methods import METHODS
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.load import LoadedModel

# Rows of logits at once: a large vocabulary takes half a megabyte each.
_ROWS = 128


@torch.inference_mode()
def prompt_logits(
    model: LoadedModel,
    token_ids: Sequence[int],
    *,
    progress: Progress | None = None,
    cancel: Event | None = None,
) -> Iterator[Tensor]:
    """Logits `(rows, vocab)` float32 of what follows each token, in order, from everything before
    it: nothing is dropped or rounded, and nothing of the reading is kept.

    Args:
        token_ids: at least one.
        progress, cancel: as in `prefill`.

    Raises:
        Stopped: `cancel` was set.
    """
    count = len(token_ids)
    policies = layer_policies(METHODS["full"](), model.shape, count, count)
    ids = torch.tensor([[*token_ids]], device=model.device)
    reading = Prefill(
        model, model.empty_cache(), ids, policies, progress=progress, cancel=cancel, whole=True
    )
    for index in range(model.shape.layers):
        reading.read_layer(index)
    for start in range(0, count, _ROWS):
        yield model.logits(reading.hidden[0, start : start + _ROWS].to(model.device))
