"""Answering by CUDA graphs: a step is recorded once and then replayed with a single launch.

A step of many layers makes a thousand launches and more, each of which takes the host longer than
a small one takes the device. A graph has them all.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kvlite.cache import KVCache
from kvlite.engine.step_program import StepProgram, refusal
from kvlite.memory.free import is_oom
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.model.load import LoadedModel
from kvlite.offload import Recall

Replay = Callable[[], Tensor]
Capture = Callable[[StepProgram], Replay]

# For fewer tokens than these, recording takes longer than it saves.
WORTHWHILE = 8


def capture(program: StepProgram) -> Replay:
    """Record what a step launches, which does not run yet; its output is that of the last
    replay."""
    device = program.model.device
    stream, graph = _stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # Kernels are compiled, and libraries take their workspace, before anything is recorded.
        program.rehearse()
        # A recording has memory of its own, and cannot take what is held for others.
        torch.cuda.empty_cache()
        # Others may allocate on threads of their own meanwhile.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            out = program.run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: libraries take a workspace of many megabytes for every stream."""
    return torch.cuda.Stream(device)


class GraphDecoder:
    """Takes an answer's steps as replays of a graph, where they are of the kind that can be.

    Attributes:
        steps: how many it took.
        reason: why it did not take the last one; "" if it did.
    """

    def __init__(self, model: LoadedModel, capture: Capture = capture) -> None:
        self.model = model
        self.steps, self.reason = 0, ""
        self._capture = capture
        self._program: StepProgram | None = None
        self._replay: Replay | None = None
        self._failed = ""

    @torch.inference_mode()
    def step(
        self,
        cache: KVCache,
        policies: list[LayerPolicy],
        token: int,
        recall: Recall | None = None,
    ) -> Tensor | None:
        """Put a token through the model: logits of the next one, `(1, vocab)` float32, which the
        next step overwrites; None if a plain step has to do it."""
        if self._program is None or not self._program.serves(cache, policies):
            self._record(cache, policies, recall)
        if self._program is None or self._replay is None:
            return None
        self._program.begin(token)
        logits = self._replay()
        self._program.end()
        self.steps += 1
        return logits

    def release(self) -> None:
        """Give back the memory of what was recorded."""
        self._program = self._replay = None

    def _record(self, cache: KVCache, policies: list[LayerPolicy], recall: Recall | None) -> None:
        """Record a step for the cache as it is now, unless there is a reason not to."""
        self.release()
        self.reason = self._failed or refusal(self.model, cache, policies, recall) or ""
        if self.reason:
            return
        try:
            program = StepProgram(self.model, cache, policies)
            if program.room < WORTHWHILE:
                self.reason = "a layer has to grow"
                return
            self._replay = self._capture(program)
        except Exception as error:  # whatever a library does that cannot be recorded
            self._failed = "memory is short" if is_oom(error) else f"it failed: {error}"
            self.reason = self._failed
            return
        self._program = program


def graph_decoder(model: LoadedModel) -> GraphDecoder | None:
    """One for an answer of a model on CUDA; None for others."""
    return GraphDecoder(model) if model.device.type == "cuda" else None
