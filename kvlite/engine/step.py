"""Decoding: rows of tokens on their way through all layers, written in place.

A row is a token of a conversation. A step takes the next token of one conversation, that and those
proposed behind it, or the next tokens of several, which read each weight once for all of them. Only
products with weights are shared: each conversation attends over its own cache, with its own
policies, at its own position, so conversations can join and leave between any two steps. The logits
of several are those that each would get alone, up to rounding: a product over several rows adds up
in another order.

Nothing counts before the end. A step that memory or an interrupt stops is as if it had not begun,
and is run again as a whole. Entries that a token was written over, or that were recalled, are lost
then, so the cache is of no use until it is.
"""

from collections.abc import Callable, Iterator, MutableSequence, Sequence
from functools import partial

import torch
from torch import Tensor

from kvlite.cache import KVCache, LayerCache
from kvlite.cache.changes import Change, make_all
from kvlite.engine import compiled_step
from kvlite.engine.cache_growth import reserve
from kvlite.engine.layer_step import LayerStep
from kvlite.engine.oom_actions import cache_oom_actions
from kvlite.engine.rows_attender import StepsAttender
from kvlite.engine.sparse_attention import sparse_masks
from kvlite.errors import OutOfMemory
from kvlite.memory.free import is_oom
from kvlite.memory.oom import OOMPolicy, T, unless_short
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.model.load import LoadedModel
from kvlite.model.rotary import rotations_apart
from kvlite.model.step_layers import StepLayer
from kvlite.offload import Recall
from kvlite.offload.kv.store import HostKVLayer


class StepRows:
    """The rows of one conversation in a step.

    Attributes:
        cache, policies, recall: as of `decode_step`.
        token_ids: `(batch, L)` int64; several tokens only of one sequence, where `room_ahead`.
        oom_policy: what is given up where memory runs out; without it, that is an error.
        start, count: the position of the first token, and L.
        hidden: what came out of the layers, `(batch, L, hidden size)`.
        entered: how many of the L are in the cache.
        layers: by number, the layers that the step has come through.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        token_ids: Tensor,
        policies: MutableSequence[LayerPolicy],
        recall: Recall | None = None,
        oom_policy: OOMPolicy | None = None,
    ) -> None:
        """Raises InterruptedCacheError if the cache is of no use."""
        cache.require_whole()
        self.model, self.cache, self.policies, self.recall = model, cache, policies, recall
        self.token_ids, self.oom_policy = token_ids, oom_policy
        self.start, self.count, self.entered = cache.seen, token_ids.shape[1], 0
        self.hidden = self._logits = torch.empty(0)
        self.layers: dict[int, LayerStep] = {}
        self._held: list[LayerCache] = []
        self._written = self.count
        self._marks: list[Change] = []
        self._stores: list[tuple[HostKVLayer, int, int]] = []
        self._again = False

    def reserve(self) -> None:
        """Make room for the rows. Raises OutOfMemory if nothing is left to give up."""
        reserve(self.cache, self.policies, self.recall, self.count, self.safely)

    def begin(self) -> None:
        """Begin to go through the layers, after `reserve`."""
        model, cache, end = self.model, self.cache, self.start + self.count
        several = self.count > 1
        positions = torch.arange(self.start, end, dtype=torch.int32, device=model.device)
        self.positions = model.by_layer(positions)
        self.rotations = (
            rotations_apart(model, range(self.start, end))
            if several
            else model.rotations(self.start, 1)
        )
        self.sparse_masks = sparse_masks(model, self.policies)
        self.layers, self._held = {}, [*cache.layers]
        self._stores = [] if self.recall is None else self.recall.store.filled()
        # Free slots that are written to count for nothing; entries that are written over do.
        full = any(not group.room for layer in cache.layers for group in layer.head_groups)
        lost = cache.writing or full or self.recall is not None
        self._marks = [*_fills(cache, self._stores), (cache, "writing", lost)]
        if self.recall is not None:
            self._marks.append((self.recall, "num_requested", self.recall.num_requested))
        cache.writing = True

    def layer(self, index: int) -> LayerStep:
        """What takes the rows through a layer."""
        if index in self.layers:
            return self.layers[index]
        cache = self.cache
        step = self.layers[index] = LayerStep(
            index,
            cache.layers[index],
            self.policies[index],
            self.start,
            self.rotations[index],
            self.sparse_masks[index],
            self.recall,
            cache.states.get(index),
            self.positions[index],
            cache.queries.get(index),
            # Layers behind it are not among them: no cycle outlives the step.
            {lender: self.layers[lender] for lender in self.model.shape.lenders if lender < index},
            again=self._again,
        )
        return step

    def rewind(self, error: BaseException) -> None:
        """Be as if the step had not begun, but for entries that were written over."""
        make_all(self._marks)
        if self.count > 1 and isinstance(error, Exception):  # an interrupt may come in an exchange
            self._return_recalled(0)
        self.layers, self._again = {}, True

    def safely(self, work: Callable[[], T]) -> T:
        """Do work that can be done again where memory runs out."""
        if self.oom_policy is None:
            return work()
        actions = cache_oom_actions(self.model, self.cache, self.policies)
        return self.oom_policy.run(work, actions)

    def came_through(self, hidden: Tensor) -> None:
        """Let the first row count, once all came out of the layers."""
        self.hidden = hidden
        self._enter()
        for index in self.layers:
            self._trim(index)

    def replayed(self, hidden: Tensor, logits: Tensor) -> None:
        """Go on after a program took all rows through the layers, and counted the first."""
        self.hidden, self._logits, self._held = hidden, logits, [*self.cache.layers]
        self.entered, self._written = 1, 0

    @torch.inference_mode()
    def accept(self, token: int) -> Tensor | None:
        """Let the next row count, if it is this token's.

        Returns:
            Logits of the token after it, `(1, vocab)` float32, made only now unless a program did:
            some products of a few rows with a large vocabulary take longer than one by one. None if
            it is another's, or the cache is no longer what it was.
        """
        at, cache = self.entered, self.cache
        if at == self.count or cache.seen != self.start + at or self.token_ids[0, at] != token:
            return None
        if self._held != cache.layers:
            return None
        logits = self._logits[at : at + 1]
        if not len(logits):
            logits = self.model.logits(self.hidden[:, at])
        self._enter()
        return logits

    @torch.inference_mode()
    def leave(self) -> None:
        """Take back what rows recalled that do not count, unless the cache has gone on."""
        if self.entered < self.count and self.cache.seen == self.start + self.entered:
            self._return_recalled(self.entered)

    def _return_recalled(self, count: int) -> None:
        """Take back what rows behind the first `count` recalled. Without memory for that, some
        stays, which is no harm: entries are exchanged as a whole, but for an interrupt."""
        layers = self.cache.layers

        def exchanged() -> bool:
            for index, step in self.layers.items():
                if step.layer is layers[index]:
                    step.return_recalled(count)
            return True

        self.cache.writing = self.recall is not None
        if not unless_short(self.model.device, exchanged):
            unless_short(self.model.device, exchanged)
        self.cache.writing = False

    def _enter(self) -> None:
        """Count the next row in all layers, in one go."""
        at, cache = self.entered, self.cache
        states = {
            index: after
            for index, step in self.layers.items()
            if (after := step.carrier.after_tokens(at + 1))
        }
        remembering = [step for step in self.layers.values() if step.attention]
        changes: list[Change] = [
            (cache, "states", cache.states | states),
            (cache, "seen", self.start + at + 1),
            (self, "entered", at + 1),
            (cache, "writing", bool(remembering)),
        ]
        if self.count > 1:  # all of them were written
            groups = [group for layer in cache.layers for group in layer.head_groups]
            written = 0 if at else self._written
            changes += [(group, "used", group.used - written + 1) for group in groups]
            for layer, used, known in self._stores:
                changes += layer.filled_to(used + at + 1, known)
        if cache.hidden is not None:
            cache.hidden.write(self.start + at, self.hidden[:, at : at + 1])
        make_all(changes)
        for step in remembering:
            step.remember()
        cache.writing = False

    def _trim(self, index: int) -> None:
        """Cut a layer, if its method does that now; where memory is short, after the next step."""
        step = self.layers[index]
        if step.asked is None and step.policy.method.decoding.trim is None:
            return

        def trimmed() -> LayerCache:
            step.layer, step.policy = self.cache.layers[index], self.policies[index]
            return step.trimmed()

        try:
            made = self.safely(trimmed)
        except OutOfMemory:
            return
        except Exception as error:
            if not is_oom(error):
                raise
            return
        self.cache.layers[index], self.policies[index] = made, step.policy


def _fills(cache: KVCache, stores: Sequence[tuple[HostKVLayer, int, int]]) -> Iterator[Change]:
    """How much is held."""
    for layer in cache.layers:
        for group in layer.head_groups:
            yield group, "used", group.used
    for source, used, known in stores:
        yield from source.filled_to(used, known)


@torch.inference_mode()
def step(model: LoadedModel, conversations: Sequence[StepRows]) -> list[Tensor | OutOfMemory]:
    """Take rows of different conversations through the model; of several conversations each has
    one row of one sequence, and those with recall have stores of their own.

    If memory runs out, each conversation goes by itself, and takes the steps of its own OOM policy.
    Without one, torch's error is raised.

    Returns:
        For each, logits of the token after its first row, `(batch, vocab)` float32; or the error
        that stopped it: it can go through again later.
    """
    results: dict[int, Tensor | OutOfMemory] = {}
    going: dict[int, StepRows] = {}
    for each, rows in enumerate(conversations):
        try:
            rows.reserve()
            going[each] = rows
        except OutOfMemory as error:
            results[each] = error.with_traceback(None)  # which holds what it had made
    together = None
    if len(going) > 1:
        together = unless_short(model.device, partial(_through, model, [*going.values()]))
    try:
        for row, (each, rows) in enumerate(going.items()):
            try:
                if together is None:
                    hidden, results[each] = rows.safely(partial(_through, model, [rows]))
                else:
                    own = slice(row, row + 1)
                    hidden, results[each] = (made[own] for made in together)
                rows.came_through(hidden)
            except OutOfMemory as error:
                results[each] = error.with_traceback(None)
    except BaseException as error:
        for rows in going.values():
            if not rows.entered:
                rows.rewind(error)
        raise
    return [results[each] for each in range(len(conversations))]


def _through(model: LoadedModel, conversations: Sequence[StepRows]) -> tuple[Tensor, Tensor]:
    """Hidden states behind all layers, and logits after the first row of each conversation."""
    try:
        for each in conversations:
            each.begin()
        token_ids = _joined([each.token_ids for each in conversations])
        hidden, index = model.embed(token_ids.to(model.device)), 0
        while index < len(model.layers):
            after, hidden = compiled_step.through_layers(model, conversations, index, hidden)
            if after == index:
                after, hidden = index + 1, through_layer(model, conversations, index, hidden)
            index = after
        hidden = hidden.to(model.device)
        return hidden, model.logits(hidden[:, 0])
    except BaseException as error:
        for each in conversations:
            each.rewind(error)
        raise


def through_layer(
    model: LoadedModel, conversations: Sequence[StepRows], index: int, hidden: Tensor
) -> Tensor:
    """What a layer makes of hidden states `(rows, L, hidden size)` of conversations that have
    begun."""
    steps = [each.layer(index) for each in conversations]
    one = hidden.shape[1] == 1
    module: StepLayer = model.step_layer(index) if one else model.layers[index]
    coses, sines = zip(*(each.rotation for each in steps), strict=True)
    given = {
        "position_ids": _joined([each.positions[None] for each in steps]),
        "position_embeddings": (_joined(coses), _joined(sines)),
    }
    hidden = hidden.to(model.device_of(index))
    if len(steps) == 1:
        return module(hidden, kvlite=steps[0], **given)
    return StepsAttender(steps).through(module, hidden, **given)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts of a batch as one; the one itself, if there is no other."""
    return torch.cat([*parts]) if len(parts) > 1 else parts[0]


def step_alone(model: LoadedModel, rows: StepRows) -> Tensor:
    """As `step`, for one conversation. Raises OutOfMemory if that stopped it."""
    (logits,) = step(model, [rows])
    if isinstance(logits, OutOfMemory):
        raise logits
    return logits


def decode_step(
    model: LoadedModel,
    cache: KVCache,
    token_ids: Tensor,
    policies: MutableSequence[LayerPolicy],
    recall: Recall | None = None,
) -> Tensor:
    """Put one token a sequence through the model.

    Args:
        token_ids: `(batch,)` int64.
        policies: one a layer; where a method leaves layers to others at the first step, that is put
            here.
        recall: takes the token too, and brings back what it wants.

    Returns:
        Logits of the next token, `(batch, vocab)` float32.
    """
    return step_alone(model, StepRows(model, cache, token_ids[:, None], policies, recall))
