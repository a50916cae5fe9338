"""The KV cache of all layers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from weakref import ref

from torch import Tensor

from kvlite.cache.hidden_log import HiddenLog
from kvlite.cache.layer import LayerCache
from kvlite.cache.query_log import QueryLog
from kvlite.cache.recurrent import States, state_tensors
from kvlite.cache.segment import bytes_held
from kvlite.errors import InterruptedCacheError


@dataclass
class KVCache:
    """All layers, and how many tokens they have seen.

    Attributes:
        layers: one `LayerCache` a layer of the model.
        seen: tokens read or generated so far; the next token's position.
        reconstructed: how many of these were repeated since they were read, for methods that score
            by repetition.
        writing: whether a decode step has begun and not ended.
        states: by layer, the states of the recurrent layers that run with it.
        queries: query logs of the layers that are watched.
        hidden: logs the last layer's output, if an MTP head needs it.
    """

    layers: list[LayerCache]
    seen: int = 0
    reconstructed: int = 0
    writing: bool = False
    states: dict[int, States] = field(default_factory=dict)
    queries: dict[int, QueryLog] = field(default_factory=dict)
    hidden: HiddenLog | None = None
    _measured: tuple[tuple[ref[LayerCache], ...], int] = field(
        default=((), 0), init=False, repr=False, compare=False
    )

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All tensors held; tensors that layers share come twice."""
        held = [tensor for layer in self.layers for tensor in layer.tensors]
        log = [] if self.hidden is None else [self.hidden.rows]
        return iter([*held, *state_tensors(self.states), *log])

    @property
    def nbytes(self) -> int:
        """Bytes held for keys and values, filled or not; shared storage counts once."""
        known, measured = self._measured
        if [each() for each in known] != self.layers:  # asked with every token, changed seldom
            measured = bytes_held(tensor for layer in self.layers for tensor in layer.tensors)
            self._measured = tuple(map(ref, self.layers)), measured
        return measured

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of recurrent layers."""
        return bytes_held(state_tensors(self.states))

    @property
    def entries_mean(self) -> float:
        """Entries held, on average over layers and KV heads."""
        return sum(layer.entries_mean for layer in self.layers) / len(self.layers)

    def require_whole(self) -> None:
        """Raises InterruptedCacheError if the last step never ended, so that layers disagree."""
        if self.writing:
            raise InterruptedCacheError(
                "an interrupted step left this conversation's cache half written: "
                "start a new conversation"
            )
