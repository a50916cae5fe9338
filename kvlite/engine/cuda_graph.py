"""CUDA graphs for decoding: a step is recorded once and then replayed with a single launch.

A step of many layers makes a thousand launches or more, and a small launch takes the host longer
than the device. A graph replaces them all.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kvlite.cache import KVCache
from kvlite.engine.sampling import Sampler
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
        graph.register_generator_state(program.sampler.generator)
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


class Launch:
    """A step that was launched, and what comes of it.

    Attributes:
        logits: `(1, vocab)` float32, from which the next token was drawn.
        generator: how the sampler's stood before.
    """

    def __init__(self, program: StepProgram) -> None:
        device = program.model.device
        self.logits = torch.empty(1, program.model.shape.vocab, device=device)
        self.generator = program.sampler.generator.get_state()
        self._token = torch.empty(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    def make(self, program: StepProgram, replay: Replay) -> None:
        """Launch it."""
        self.generator = program.sampler.generator.get_state()
        self.logits.copy_(replay())
        self._token.copy_(program.token, non_blocking=True)
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(program.model.device))

    def token(self) -> int:
        """The token that was drawn, once it is there."""
        if self._done is not None:
            self._done.synchronize()
        return int(self._token)


class GraphDecoder:
    """Runs an answer's steps as replays of a graph, if they can be recorded.

    A replay passes its token to the next one on the device, so the host may launch the next step
    before it knows the token. If layers only append, a step that does not count changes nothing.

    Attributes:
        steps: how many it took.
        reason: why it did not take the last one; "" if it did.
    """

    def __init__(self, model: LoadedModel, sampler: Sampler, capture: Capture = capture) -> None:
        self.model, self.sampler = model, sampler
        self.steps, self.reason = 0, ""
        self._capture = capture
        self._program: StepProgram | None = None
        self._replay: Replay | None = None
        self._failed = ""
        self._launches: list[Launch] = []
        self._last: Launch | None = None
        self._ahead: Launch | None = None
        # Tokens in the cache, and the next one, if it is known, that the program goes on with.
        self._stands: tuple[int, int | None] = -1, None

    @torch.inference_mode()
    def step(
        self,
        cache: KVCache,
        policies: list[LayerPolicy],
        token: int,
        seen: list[int],
        recall: Recall | None = None,
        *,
        ahead: bool = False,
    ) -> Tensor | None:
        """Put a token through the model, after those `seen`, and draw the next one.

        Args:
            ahead: launch the step after it, too, if that changes nothing before it counts.

        Returns:
            Logits of the next token, `(1, vocab)` float32, which the step after the next one
            overwrites; None if a plain step has to do it.
        """
        if self._program is None or not self._program.serves(cache, policies):
            self._record(cache, policies, seen, recall)
        program, replay = self._program, self._replay
        if program is None or replay is None:
            return None
        if self._stands != (cache.seen, token):
            self._forget()
            program.begin(token, seen)
        cache.writing = True
        launch, self._ahead = self._ahead or self._launched(program, replay), None
        program.end()
        self._last, self._stands = launch, (cache.seen, None)
        self.steps += 1
        if ahead and not self.sampler.on_host and program.appends and program.room:
            self._ahead = self._launched(program, replay)
        return launch.logits

    @torch.inference_mode()
    def drawn(self) -> int | None:
        """The token that the last step drew; None if it drew none, or the cache has gone on without
        it."""
        if self._last is None or self._program is None or self.sampler.on_host:
            return None
        seen = self._program.cache.seen
        if self._stands != (seen, None):
            self._forget()
            return None
        token = self._last.token()
        self._stands = seen, token
        return token

    def _forget(self) -> None:
        """Forget what was drawn or launched ahead."""
        if self._ahead is not None:
            self.sampler.generator.set_state(self._ahead.generator)
        self._ahead = self._last = None
        self._stands = -1, None

    def release(self) -> None:
        """Give back the memory of what was recorded."""
        self._forget()
        self._program = self._replay = None

    def _launched(self, program: StepProgram, replay: Replay) -> Launch:
        """The program's next step, launched."""
        self._launches.reverse()
        self._launches[0].make(program, replay)
        return self._launches[0]

    def _record(
        self,
        cache: KVCache,
        policies: list[LayerPolicy],
        seen: list[int],
        recall: Recall | None,
    ) -> None:
        """Record a step for the cache as it is now, unless there is a reason not to."""
        self.release()
        self.reason = self._failed or refusal(self.model, cache, policies, recall) or ""
        if self.reason:
            return
        try:
            program = StepProgram(self.model, cache, policies, self.sampler, seen, recall)
            if program.room < WORTHWHILE:
                self.reason = "a layer has to grow"
                return
            self._launches = self._launches or [Launch(program), Launch(program)]
            self._replay = self._capture(program)
        except (AttributeError, TypeError):  # a fault of ours, which plain steps would hide
            raise
        except Exception as error:  # whatever a library does that cannot be recorded
            self._failed = "memory is short" if is_oom(error) else f"it failed: {error}"
            self.reason = self._failed
            return
        self._program = program


def graph_decoder(model: LoadedModel, sampler: Sampler) -> GraphDecoder | None:
    """One for an answer of a model on CUDA; None for others."""
    return GraphDecoder(model, sampler) if model.device.type == "cuda" else None
