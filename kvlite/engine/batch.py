"""Several conversations in one decode step, which reads each weight once for all of them.

Only products with weights are shared. Each conversation attends over its own cache, with its own
policies, at its own position, so conversations can join and leave between any two steps. Its logits
are those it would get alone, up to rounding: a product over several rows adds up in another order.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kvlite.cache.recurrent import StateCarrier, joined, parted
from kvlite.engine import compiled_rows, compiled_step
from kvlite.engine.decode import LayerStep, Step
from kvlite.errors import OutOfMemory
from kvlite.memory.free import is_oom, release_memory
from kvlite.memory.oom import T
from kvlite.model.attention_interface import Lender
from kvlite.model.load import LoadedModel
from kvlite.ops.softmax import Softmax


class RowsAttender:
    """Attends with row i of a batch to the layer of conversation i.

    Attributes:
        carrier: the states of recurrent layers, those of conversation i in row i.
    """

    def __init__(self, steps: Sequence[LayerStep]) -> None:
        self.steps = steps
        self.carrier = StateCarrier(joined([step.carrier.before for step in steps]))

    def hand_back(self) -> None:
        """Return each conversation's own states after the token."""
        rows = parted(self.carrier.after, len(self.steps))
        for step, states in zip(self.steps, rows, strict=True):
            step.carrier.after = states

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """As `model.attention_interface.Attender`."""
        plain, out = compiled_rows.plain(self.steps, q, k, v), torch.empty_like(q)
        if plain:
            given = q[plain], k[plain], v[plain]
            out[plain] = compiled_rows.attend([self.steps[row] for row in plain], *given, softmax)
        for row, step in enumerate(self.steps):
            if row not in plain:
                own = slice(row, row + 1)
                out[own] = step.attend(q[own], k[own], v[own], softmax)
        return out

    def lender(self, index: int) -> Lender:
        """As of `LayerStep`, a row each."""
        lenders = [step.lender(index) for step in self.steps]
        coses, sines = zip(*(lender.rotation for lender in lenders), strict=True)

        def over(q: Tensor, softmax: Softmax) -> Tensor:
            rows = zip(lenders, q.split(1), strict=True)
            return torch.cat([lender.over(q, softmax) for lender, q in rows])

        return Lender((torch.cat(coses), torch.cat(sines)), over)


@torch.inference_mode()
def run_together(model: LoadedModel, steps: Sequence[Step]) -> list[Tensor | OutOfMemory]:
    """Run steps of different caches that have not begun; those with recall have their own stores.

    If memory runs out in a layer, each conversation goes through that layer by itself, and takes
    the steps of its own OOM policy. A conversation with no steps left stops there; the others
    continue. Without an OOM policy, torch's error is raised.

    Returns:
        For each, logits of the next token, `(1, vocab)` float32; or the error that stopped it: its
        step can be `run` again later.
    """
    results: dict[int, Tensor | OutOfMemory] = {}
    going = dict(enumerate(steps))
    for step in steps:
        step.cache.writing = True
    while any(step.index < len(model.layers) for step in going.values()):
        if len(going) > 1:
            together = [*going.values()]
            if _unless_short(model, partial(compiled_step.through_layers, model, together)):
                continue
            _unless_short(model, partial(_through_layer, model, together))
        for each, step in [*going.items()]:
            try:
                step.go_on()
            except OutOfMemory as error:
                results[each] = error.with_traceback(None)  # which holds what it had made
                del going[each]
    logits = None
    if len(going) > 1:
        logits = _unless_short(model, partial(_logits, model, [*going.values()]))
    for row, (each, step) in enumerate(going.items()):
        try:
            results[each] = step.run() if logits is None else step.end(logits[row : row + 1])
        except OutOfMemory as error:
            results[each] = error.with_traceback(None)
    return [results[each] for each in range(len(steps))]


def _through_layer(model: LoadedModel, steps: Sequence[Step]) -> None:
    """Bring steps through the next layer; what came out is theirs to go on with."""
    index = steps[0].index
    hidden = torch.cat([step.hidden for step in steps])
    coses, sines = zip(*(step.rotations[index] for step in steps), strict=True)
    begun = [step.begin_layer() for step in steps]
    try:
        attender = RowsAttender(begun)
        rotation = torch.cat(coses), torch.cat(sines)
        through = model.step_layer(index)(
            hidden,
            position_ids=torch.stack([step.positions for step in begun]),
            position_embeddings=rotation,
            kvlite=attender,
        )
        attender.hand_back()
    finally:
        for step in steps:
            step.leave_layer()
    for step, row in zip(steps, through.split(1), strict=True):
        step.through = row


def _logits(model: LoadedModel, steps: Sequence[Step]) -> Tensor:
    return model.logits(torch.cat([step.hidden[:, -1] for step in steps]))


def _unless_short(model: LoadedModel, work: Callable[[], T]) -> T | None:
    """Do work that can be done again; None if memory runs out."""
    try:
        return work()
    except Exception as error:
        if not is_oom(error):
            raise
    # The error is gone here, and with its traceback what the work had made.
    release_memory(model.device)
    return None
