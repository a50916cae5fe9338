"""What was read is repeated, passage by passage, to see which entries the model then looks at.

Source: "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", section 3. There
the whole cache is read first and then repeated to; here a layer is repeated to as soon as it was
read, and cut before the next, so the whole cache never exists.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlite.cache import LayerCache
from kvlite.engine.reader import LayerReader
from kvlite.engine.watch import Watch
from kvlite.methods.base import Rehearsal
from kvlite.methods.rules import Rule
from kvlite.methods.scores import Window, passage_scores
from kvlite.model.load import LoadedModel

BEGIN = "\n\nRepeat the previous context exactly.\n\n"
GO_ON = "\n\nRepeat the part of the previous context exactly, starting with {}\n\n"
REMINDER, MOST_ASKED, SHORTEST = 8, 48, 256


@dataclass
class Passage:
    """A part of what was read, and the rows that ask for it and say it.

    Attributes:
        first, end: positions of the part.
        hidden: `(batch, rows, hidden size)` on their way through the layers.
    """

    first: int
    end: int
    hidden: Tensor


class Repetition:
    """All passages, one layer at a time. Each follows what was read and none of the others, and
    nothing of them stays.

    Attributes:
        rows: tokens of all passages together.
    """

    def __init__(
        self,
        model: LoadedModel,
        told: Tensor,
        end: int,
        rehearsal: Rehearsal,
        *,
        fresh: bool,
        chunk: int,
    ) -> None:
        """Prepare to repeat what was not repeated yet.

        Args:
            told: its tokens, `(batch, n)` int64, the last of what was read.
            end: the position after them.
            fresh: nothing was repeated before.
            chunk: rows that go through a layer together.
        """
        self.model = model
        self.end = end
        self.sinks = rehearsal.sinks
        self.fresh = fresh
        self.chunk = chunk
        self.passages: list[Passage] = []
        start, size = end - told.shape[1], self._size(rehearsal.passage)
        for at in range(0, told.shape[1], size):
            part, before = told[:, at : at + size], told[:, max(0, at - REMINDER) : at]
            asked = torch.tensor([self._asked(before[0].tolist())], device=told.device)
            said = torch.cat([asked.expand(told.shape[0], -1), part], 1)
            span = start + at, start + at + part.shape[1]
            self.passages.append(Passage(*span, model.embed(said)))
        rows = [passage.hidden.shape[1] for passage in self.passages]
        self.longest, self.rows = max(rows), sum(rows)
        self.rotations = model.rotations(end, self.longest)
        self.positions = torch.arange(
            end, end + self.longest, dtype=torch.int32, device=model.device
        )

    def _size(self, passage: int) -> int:
        """Tokens a passage, no more than the model was trained to see behind what it read; where
        there is no room left it goes a little beyond."""
        room = self.model.shape.max_context - self.end - MOST_ASKED
        return min(passage, max(room, SHORTEST))

    def _asked(self, before: list[int]) -> list[int]:
        """Tokens that ask for the part that follows `before`; the first, if that is empty."""
        tokenizer = self.model.tokenizer
        text = GO_ON.format(tokenizer.decode(before)) if before else BEGIN
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    def rate(
        self,
        index: int,
        layer: LayerCache,
        rule: Rule,
        *,
        answers: bool,
        passed: Callable[[int], None],
    ) -> None:
        """Take every passage through a layer that holds all that was read.

        Args:
            layer: gets, where the rule's method rehearses, the most attention that any query paid
                to an entry of its own passage, in the row of its banks.
            answers: whether a layer follows.
            passed: told how many rows went through, passage by passage.
        """
        roomy = layer.resized([used + self.longest for _, used in layer.lines])
        marks = roomy.mark()
        rates = rule.method.rehearsal is not None
        if rates and self.fresh:
            layer.clear_rows()
        rows = 0
        for passage in self.passages:
            window = self._through(index, passage, roomy, rule.window, answers)
            if rates:
                for bank, longer in zip(layer.banks, roomy.banks, strict=True):
                    span = passage.first, passage.end
                    bank.raise_to(passage_scores(longer, window, bank.used, span, self.sinks))
            roomy.rewind(marks)
            rows += passage.hidden.shape[1]
            passed(rows)

    def _through(
        self, index: int, passage: Passage, layer: LayerCache, window: int | None, answers: bool
    ) -> Window:
        """Take a passage through a layer, and give back its queries."""
        rows, module = passage.hidden.shape[1], self.model.layers[index]
        cos, sin = self.rotations[index]
        reader = LayerReader(
            layer,
            Rule(Watch(rows), 0, window),
            self.positions[:rows],
            self.end + rows,
            (cos[:, :rows], sin[:, :rows]),
        )
        for at in range(0, rows, self.chunk):
            span = slice(at, min(at + self.chunk, rows))
            hidden = passage.hidden[:, span]
            passage.hidden[:, span] = reader.take(module, hidden, answers=answers)
        return reader.view(index).window
