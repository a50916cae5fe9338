"""A decode step as one program: everything that changes from token to token is on the device.

The token, its position and its slots are tensors, and the next token is drawn on the device. So the
same launches serve every token, and a CUDA graph can replay them. The host's decisions happen
between programs, in `engine.step`: more room, quantizing entries once there are too many recent
ones, methods that resolve or trim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlite.cache.recurrent import copies_of
from kvlite.engine.layer_program import LayerProgram
from kvlite.engine.rows_attender import RowsAttender
from kvlite.engine.sampling import Sampler
from kvlite.engine.sparse_attention import sparse_masks
from kvlite.engine.step import StepRows
from kvlite.model.load import LoadedModel
from kvlite.offload.kv.recall_program import RecallClock


class RowProgram:
    """One row of a program.

    Attributes:
        layers: those that the row's token goes through.
        states: of recurrent layers, which a run changes in place.
        behind: how many rows of the same conversation come before it, in slots that are free.
    """

    def __init__(
        self, model: LoadedModel, rows: StepRows, position: Tensor, behind: int = 0
    ) -> None:
        """For one token of one sequence that may be captured (`runs_with`); `position` is its,
        `(1,)` int64."""
        cache, recall = rows.cache, rows.recall
        self.cache, self.policies, self.position = cache, [*rows.policies], position
        self.limit, self.behind = model.shape.max_context, behind
        position.fill_(cache.seen + behind)
        self.clock = None if recall is None else RecallClock(recall, position)
        self.states = copies_of(cache.states, model.device_of)
        by_number: dict[int, LayerProgram] = {}
        lenders = model.shape.lenders
        each = zip(cache.layers, rows.policies, sparse_masks(model, rows.policies), strict=True)
        for index, (layer, policy, mask) in enumerate(each):
            by_number[index] = LayerProgram(
                *(index, layer, policy, mask, position, cache.seen, self.clock),
                log=cache.queries.get(index),
                states=self.states.get(index),
                lenders={lender: by_number[lender] for lender in lenders if lender < index},
            )
        self.layers = [*by_number.values()]
        # Of all layers, where the token at position 0 would have been appended, and where this one
        # is.
        self.first = torch.cat([layer.first for layer in self.layers])
        self.slots = self.first + position
        own = self.slots.split([len(layer.first) for layer in self.layers])
        firsts = self.first.split([len(layer.first) for layer in self.layers])
        for layer_program, first, slots in zip(self.layers, firsts, own, strict=True):
            layer_program.first, layer_program.slots = first, slots

    @property
    def appends(self) -> bool:
        """Whether a run changes nothing that was there, so that it need not count."""
        return not any(layer.changes for layer in self.layers)

    @property
    def room(self) -> int:
        """Tokens that can still go through."""
        rooms = [room for layer in self.layers if (room := layer.room) is not None]
        return min(rooms, default=self.limit) - self.behind

    def serves(self, rows: StepRows) -> bool:
        """Whether a token of a conversation can go through it. Others may have been appended in the
        meantime, or taken back."""
        layers = zip(self.layers, rows.cache.layers, strict=True)
        policies = zip(self.policies, rows.policies, strict=True)
        return (
            rows.cache is self.cache
            and all(own.layer is layer for own, layer in layers)
            and all(own is policy for own, policy in policies)
            and self.room > 0
        )

    @property
    def free(self) -> bool:
        """Whether a token can go through before anything is quantized."""
        return all(layer.free > self.behind for layer in self.layers)

    def tick(self) -> None:
        """Compute what follows from the position."""
        torch.add(self.first, self.position, out=self.slots)
        if self.clock is not None:
            self.clock.tick()

    def begin(self) -> None:
        """Go on from what the cache holds now."""
        self.follow()
        for index, own in self.states.items():
            for place, state in own.items():
                state.take(self.cache.states[index][place])
        self.position.fill_(self.cache.seen + self.behind)

    def follow(self) -> None:
        """Let the device know what was quantized since the last token."""
        for layer in self.layers:
            layer.follow()

    def end(self, hidden: Tensor) -> None:
        """Count the token that went through, of which `(1, 1, hidden size)` came out."""
        if self.cache.hidden is not None:
            self.cache.hidden.write(self.cache.seen, hidden)
        for layer in self.layers:
            layer.advance(self.cache.seen)
        self.cache.states = self.states
        self.cache.seen += 1
        self.cache.writing = False


class StepProgram:
    """Rows of some conversations on their way through all layers, for as many tokens as the caches'
    storage serves; a single row also to the next token.

    Attributes:
        rows: of the conversations, those of one behind each other.
        token, position: `(rows,)` int64, of the tokens that go through; a run that draws leaves
            those of the next one.
        hidden: what came out of all layers, `(rows, 1, hidden size)`.
        sampler: draws the next token; None if that is done elsewhere.
        context: `(1, n)` int64, all tokens before it, if the sampler looks at them.
    """

    def __init__(
        self,
        model: LoadedModel,
        conversations: Sequence[StepRows],
        sampler: Sampler | None = None,
        seen: Sequence[int] = (),
    ) -> None:
        """For conversations that may be captured (`runs_with`); one that is drawn for has the
        tokens `seen`."""
        self.model, self.modules, self.sampler = model, model.layers, sampler
        each = [(rows, behind) for rows in conversations for behind in range(rows.count)]
        self.token = torch.zeros(len(each), dtype=torch.int64, device=model.device)
        self.position, self.hidden = torch.zeros_like(self.token), torch.empty(0)
        self.rows = [
            RowProgram(model, rows, place, behind)
            for (rows, behind), place in zip(each, self.position.split(1), strict=True)
        ]
        # A token that is there twice is penalized once.
        penalized = sampler is not None and sampler.penalized
        known = [*seen, *[seen[0]] * self.room] if penalized else []
        self.context = torch.tensor([known], dtype=torch.int64, device=model.device)
        self.before = self.rows[0].cache.seen - len(seen)

    @property
    def draws(self) -> bool:
        """Whether a run draws the next token: a grammar allows what it does once that is known."""
        return self.sampler is not None and not self.sampler.on_host

    @property
    def room(self) -> int:
        """Tokens of each conversation that can still go through."""
        return min(row.room for row in self.rows)

    @property
    def free(self) -> bool:
        """Whether the next tokens can go through before anything is quantized."""
        return all(row.free for row in self.rows)

    def serves(self, conversations: Sequence[StepRows]) -> bool:
        """Whether the next tokens of these conversations can go through it."""
        asked = [(rows, behind) for rows in conversations for behind in range(rows.count)]
        same = self.model.layers is self.modules
        same = same and [row.behind for row in self.rows] == [behind for _, behind in asked]
        return same and all(
            row.serves(rows) for row, (rows, _) in zip(self.rows, asked, strict=True)
        )

    def run(self) -> Tensor:
        """Put the tokens through the model: logits of the next ones, `(rows, vocab)` float32."""
        for row in self.rows:
            row.tick()
        hidden, at = self.model.embed(self.token[:, None]), self.position[:, None]
        rotations = self.model.rotations_at(self.position, self.model.dtype)
        for index, (cos, sin) in enumerate(rotations):
            module = self.model.step_layer(index)
            layers = [row.layers[index] for row in self.rows]
            for place, layer in enumerate(layers):
                own = slice(place, place + 1)
                layer.rotation = cos[:, own], sin[:, own]
            given = {
                "position_ids": at,
                "position_embeddings": (cos.transpose(0, 1), sin.transpose(0, 1)),
            }
            if len(layers) == 1:
                hidden = module(hidden, kvlite=layers[0], **given)
            else:
                hidden = RowsAttender(layers).through(module, hidden, **given)
            for layer in layers:
                layer.keep_states()
        self.hidden, logits = hidden, self.model.logits(hidden[:, -1])
        if self.sampler is None or not self.draws:
            return logits
        if self.sampler.penalized:
            self.context.index_copy_(1, self.position - self.before, self.token[None])
        self.token.copy_(self.sampler.draw(logits, self.context))
        self.position.add_(1)
        return logits

    def rehearse(self) -> None:
        """Do everything that `run` does except writing to the caches, to trigger first-use
        setup."""
        drawn = None if self.sampler is None else self.sampler.generator.get_state()
        layers = [layer for row in self.rows for layer in row.layers]
        for layer in layers:
            layer.writes = False
        try:
            self.run()
        finally:
            if self.sampler is not None and drawn is not None:
                self.sampler.generator.set_state(drawn)
            for layer in layers:
                layer.writes = True

    def begin(self, tokens: Sequence[int], seen: Sequence[int] = ()) -> None:
        """Let tokens go through next, one after those `seen`."""
        for row, place, token in zip(self.rows, self.token.split(1), tokens, strict=True):
            row.begin()
            place.fill_(token)
        if self.sampler is not None and self.sampler.penalized:
            self.context[0, : len(seen)] = torch.tensor(seen)

    def end(self) -> None:
        """Count the first token of each conversation."""
        for row, hidden in zip(self.rows, self.hidden.split(1), strict=True):
            if not row.behind:
                row.end(hidden)
