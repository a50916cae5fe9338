"""A model's own head proposes tokens (`model.mtp`).

It attends only to the last tokens, whose hidden states are logged; these have attended to
everything before. So its memory does not depend on the length of the text. Gated attention, which
all supported models with such a head have, needs no first tokens as sinks (Qiu et al., "Gated
Attention for Large Language Models", 2025).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlite.cache import KVCache, LayerCache, Selection
from kvlite.cache.hidden_log import ROWS, HiddenLog
from kvlite.engine.layer_step import LayerStep
from kvlite.engine.prompt_lookup import PromptLookup
from kvlite.engine.speculate import WIDEST, Proposer
from kvlite.methods.full import Full
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.model.load import LoadedModel
from kvlite.model.shape import ModelShape

# The entries that the head's layer has room for; if it is full, the last ROWS stay.
ROOM = 2 * ROWS + WIDEST
# How often a proposal is taken to come before that is known, and how many that counts for.
CHANCE, WEIGHT = 0.7, 4.0
# What the head's layer does with a token: it appends it.
_KEPT = LayerPolicy(Full(), ROOM)


class MtpGuesses:
    """Proposes the tokens that a model's head finds most likely.

    An entry of the head's layer is made of a token and of the hidden state of that before it.

    Attributes:
        log: the hidden states of tokens that went through the model.
        token_ids: those so far.
        read: the tokens so far that have an entry, or had.
    """

    def __init__(self, model: LoadedModel, log: HiddenLog, token_ids: Sequence[int]) -> None:
        self.model, self.log, self.read, self.token_ids = model, log, 0, [*token_ids]
        self._layer: LayerCache | None = None
        self._guessed: list[int] = []
        self._came, self._tried = CHANCE * WEIGHT, WEIGHT

    def push(self, token: int) -> None:
        """Go on with the next token, and count whether it was the one to be expected."""
        self.token_ids.append(token)
        if self._guessed:
            came = self._guessed.pop(0) == token
            self._tried += 1
            self._came += came
            self._guessed = self._guessed if came else []

    def chances(self, count: int) -> list[float]:
        """How likely the first, the first two, ... of `count` proposed tokens all come."""
        chance = self._came / self._tried
        return [chance ** (ahead + 1) for ahead in range(count)]

    @torch.inference_mode()
    def proposed(self, count: int) -> list[int]:
        """The next `count` tokens."""
        try:
            found = self._likeliest(count)
        except BaseException:
            self.release()  # it may be half written
            raise
        self._guessed = [*found]
        return found

    def _likeliest(self, count: int) -> list[int]:
        log, end = self.log, len(self.token_ids)
        if not log.start < end <= log.end + 1:
            return []
        if self._layer is None or self.read <= log.start:
            self._layer, self.read = self._empty(), log.start + 1
        layer = self._layer = _with_room(self._layer, end - self.read + count)
        before = self.model.final_norm(log.of(range(self.read - 1, end - 1)))
        made = self._through(layer, self.token_ids[self.read :], before)
        found, marks = [self._token(made)], layer.mark()
        while len(found) < count:
            made = self._through(layer, found[-1:], made[:, -1:])
            found.append(self._token(made))
        layer.rewind(marks)
        self.read = end
        return found

    def release(self) -> None:
        """Let go of the head's entries."""
        self._layer = None

    def _empty(self) -> LayerCache:
        size, model = self.model.shape.kv_size, self.model
        return LayerCache.empty(size, dtype=model.dtype, device=model.device).resized([ROOM])

    def _through(self, layer: LayerCache, token_ids: list[int], before: Tensor) -> Tensor:
        """Put tokens through the head, from position `read` on; what it makes of them.

        Args:
            before: what the model, or the head, made of the token before each.
        """
        model, count = self.model, len(token_ids)
        at = torch.arange(self.read, self.read + count, dtype=torch.int32, device=model.device)
        rotation = model.rotations_at(at, model.dtype)[-1]
        made: Tensor = model.mtp(
            model.embed(torch.tensor([token_ids], device=model.device)),
            before,
            position_embeddings=rotation,
            attention_mask=None,
            position_ids=at[None],
            past_key_values=None,
            kvlite=LayerStep(0, layer, _KEPT, self.read, rotation, positions=at),
        )
        self.read += count
        return made

    def _token(self, made: Tensor) -> int:
        return int(self.model.module.lm_head(made[:, -1]).argmax(-1))


def _with_room(layer: LayerCache, count: int) -> LayerCache:
    """A layer with free slots for so many tokens, up to ROWS and WIDEST more."""
    head_group = layer.head_groups[0]
    if head_group.room >= count:
        return layer
    slots = head_group.positions[..., : head_group.used].argsort(-1)[..., -ROWS:]
    return LayerCache.gathered([Selection(head_group, slots)], [ROOM])


def beside_bytes(shape: ModelShape, itemsize: int) -> int:
    """Bytes that a head holds besides its weights: its entries, twice where some are dropped, and
    the log."""
    size = shape.kv_size
    entries = 2 * ROOM * size.heads * size.entry_bytes(itemsize)
    return entries + ROWS * shape.hidden * itemsize


def proposers(model: LoadedModel, cache: KVCache, token_ids: Sequence[int]) -> list[Proposer]:
    """What proposes tokens of an answer to `token_ids`, which were read into `cache`."""
    looked_up = PromptLookup(token_ids)
    if model.mtp is None or cache.hidden is None:
        return [looked_up]
    return [looked_up, MtpGuesses(model, cache.hidden, token_ids)]
