"""CUDA graphs for decoding: a step is recorded once and then replayed with a single launch.

A step of many layers makes a thousand launches or more, and a small launch takes the host longer
than the device. A graph replaces them all.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from kvlite.engine.runs_with import BOTH, reason_against
from kvlite.engine.sampling import Sampler
from kvlite.engine.step import StepRows
from kvlite.engine.step_program import StepProgram
from kvlite.errors import OutOfMemory
from kvlite.memory.free import is_oom
from kvlite.model.load import LoadedModel

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
        if program.sampler is not None:
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
        logits: `(rows, vocab)` float32, from which the next token was drawn, if one was.
        generator: how the sampler's stood before.
    """

    def __init__(self, program: StepProgram) -> None:
        device, rows = program.model.device, len(program.rows)
        self.logits = torch.empty(rows, program.model.shape.vocab, device=device)
        self.generator = torch.empty(0)
        self._token = torch.empty(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    def make(self, program: StepProgram, replay: Replay) -> None:
        """Launch it."""
        if program.sampler is not None:
            self.generator = program.sampler.generator.get_state()
        self.logits.copy_(replay())
        if not program.draws:
            return
        self._token.copy_(program.token, non_blocking=True)
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(program.model.device))

    def token(self) -> int:
        """The token that was drawn, once it is there."""
        if self._done is not None:
            self._done.synchronize()
        return int(self._token)


class GraphDecoder:
    """Runs steps as replays of a graph, if they can be recorded: those of one answer, of several
    that come together, or of one with tokens that are proposed behind the next.

    Of one answer a replay passes its token to the next one on the device, so the host may launch
    the next step before it knows the token. If layers only append, a step that does not count
    changes nothing.

    Attributes:
        steps: how many it took.
        reason: why it did not take the last one; "" if it did.
    """

    def __init__(
        self, model: LoadedModel, sampler: Sampler | None = None, capture: Capture = capture
    ) -> None:
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
        self, conversations: Sequence[StepRows], seen: Sequence[int] = (), *, ahead: bool = False
    ) -> Tensor | None:
        """Put the next token of each conversation through the model; of one that is drawn for,
        after those `seen`, and draw the next.

        Args:
            ahead: launch the step after it, too, if that changes nothing before it counts.

        Returns:
            Logits of the tokens after each row, `(rows, vocab)` float32, which the step after the
            next one overwrites; None if a plain step has to do it. Only the first row of a
            conversation counts.
        """
        program, replay = self._serving(conversations, seen)
        if program is None or replay is None:
            return None
        tokens = [token for each in conversations for token in each.token_ids[0].tolist()]
        cache = conversations[0].cache
        if not program.draws or self._stands != (cache.seen, tokens[0]):
            self._forget()
            program.begin(tokens, seen)
        for each in conversations:
            each.cache.writing = True
        launch, self._ahead = self._ahead or self._launched(program, replay), None
        program.end()
        if len(program.rows) > len(conversations):  # of one, as proposed
            conversations[0].replayed(program.hidden.transpose(0, 1), launch.logits)
        self._last, self._stands = launch, (cache.seen, None)
        self.steps += 1
        appends = all(row.appends for row in program.rows)
        if ahead and program.draws and appends and program.room and program.free:
            self._ahead = self._launched(program, replay)
        return launch.logits

    @torch.inference_mode()
    def drawn(self) -> int | None:
        """The token that the last step drew; None if it drew none, or the cache has gone on without
        it."""
        if self._last is None or self._program is None or not self._program.draws:
            return None
        seen = self._program.rows[0].cache.seen
        if self._stands != (seen, None):
            self._forget()
            return None
        token = self._last.token()
        self._stands = seen, token
        return token

    def _forget(self) -> None:
        """Forget what was drawn or launched ahead."""
        if self._ahead is not None and self.sampler is not None:
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

    def _serving(
        self, conversations: Sequence[StepRows], seen: Sequence[int]
    ) -> tuple[StepProgram | None, Replay | None]:
        """A program that serves the conversations, and its recording, unless there is a reason
        against it."""
        if self._served(conversations) and self._program is not None and self._program.free:
            return self._program, self._replay
        try:
            for each in conversations:
                each.reserve()
        except OutOfMemory:  # as a plain step will find out, for each by itself
            self.release()
            self.reason = "memory is short"
            return None, None
        if self._served(conversations) and self._program is not None:
            for row in self._program.rows:
                row.follow()
            return self._program, self._replay
        reasons = (
            reason_against(
                "graph" if each.count == 1 else BOTH,
                *(self.model, each.cache, each.policies, each.recall),
            )
            for each in conversations
        )
        self.reason = self._failed or next(filter(None, reasons), "")
        if not self.reason:
            self._record(conversations, seen)
        return self._program, self._replay

    def _served(self, conversations: Sequence[StepRows]) -> bool:
        """Whether the program serves the conversations; one that does not is released."""
        if self._program is not None and not self._program.serves(conversations):
            self.release()
        return self._program is not None

    def _record(self, conversations: Sequence[StepRows], seen: Sequence[int]) -> None:
        """Record a step of the conversations as they are now."""
        try:
            program = StepProgram(self.model, conversations, self.sampler, seen)
            if program.room < WORTHWHILE:
                self.reason = "a layer has to grow"
                return
            if [len(each.logits) for each in self._launches[:1]] != [len(program.rows)]:
                self._launches = [Launch(program), Launch(program)]
            self._replay = self._capture(program)
        except (AttributeError, TypeError):  # a fault of ours, which plain steps would hide
            raise
        except Exception as error:  # whatever a library does that cannot be recorded
            self._failed = "memory is short" if is_oom(error) else f"it failed: {error}"
            self.reason = self._failed
            return
        self._program = program


def graph_decoder(model: LoadedModel, sampler: Sampler | None = None) -> GraphDecoder | None:
    """One for an answer of a model on CUDA, or for several without a sampler; None for others."""
    return GraphDecoder(model, sampler) if model.device.type == "cuda" else None
