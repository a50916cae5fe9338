"""Decode steps that several answers take together."""

from collections.abc import Sequence
from contextlib import ExitStack

from torch import Tensor

from kvlite.conversation.turn import Turn
from kvlite.engine.cuda_graph import GraphDecoder, graph_decoder
from kvlite.engine.step import StepRows, step
from kvlite.errors import OutOfMemory


class StepsTogether:
    """Takes steps of turns of one model that have a pending token: on CUDA as replays of a graph,
    which is recorded anew when a turn joins or leaves."""

    def __init__(self) -> None:
        self._graphs: GraphDecoder | None = None

    def take(self, turns: Sequence[Turn]) -> None:
        """One step for each; a turn by itself takes its own. Where memory runs out, a turn tries
        again by itself when its next piece is asked for."""
        if len(turns) < 2:
            self.release()
            return
        rows = [turn.next_rows() for turn in turns]
        for turn in turns:
            if turn.speculation is not None:
                turn.speculation.joins()
        with ExitStack() as stack:
            for turn in turns:
                stack.enter_context(turn.stepping())
            logits = self._replayed(turns, rows)
            made = step(turns[0].model, rows) if logits is None else [*logits.split(1)]
            for turn, own, result in zip(turns, rows, made, strict=True):
                turn.together = max(turn.together, len(turns))
                if isinstance(result, OutOfMemory):
                    turn.rows = own
                else:
                    turn.entered(result)

    def release(self) -> None:
        """Give back the memory of what was recorded."""
        if self._graphs is not None:
            self._graphs.release()
        self._graphs = None

    def _replayed(self, turns: Sequence[Turn], rows: Sequence[StepRows]) -> Tensor | None:
        """The logits of a replay, if there can be one."""
        model = turns[0].model
        if self._graphs is None or self._graphs.model is not model:
            self._graphs = graph_decoder(model)
        graphs = self._graphs
        if graphs is None:
            return None
        for own in (turn.graphs for turn in turns if turn.graphs is not None):
            own.release()
        logits = graphs.step(rows)
        for own in (turn.graphs for turn in turns if turn.graphs is not None):
            own.steps, own.reason = own.steps + (logits is not None), graphs.reason
        return logits
