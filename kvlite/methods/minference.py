"""MInference: reads a long text with attention to some columns and to nearby tokens only."""

from dataclasses import dataclass, replace
from functools import cached_property

from kvlite.errors import SettingError
from kvlite.methods.capabilities import Prefilling, VerticalSlash
from kvlite.methods.wrapper import Wrapper


@dataclass(frozen=True)
class MInference(Wrapper):
    """Reads faster: of the entries further back, the tokens of a chunk attend only to those that
    the chunk's last queries attend to most. The inner method, written after a plus sign, decides
    what is kept: `minference+snapkv`; without one, everything is kept.

    This is the paper's vertical-slash pattern. There the last 64 queries of the whole prompt choose
    columns and diagonals for every query head. Here the last queries of each chunk choose columns
    for every KV head, the diagonals are the near entries, and all computation is dense, so that
    any attention kernel works. The text is read approximately: its logits are not the full cache's.
    Chunks that see no more than these entries, or have no more rows than choose, are read exactly.

    Attributes:
        columns: entries further back that a chunk attends to.
        near: entries before a chunk that it always attends to.
        observed: last queries of a chunk that choose.
        sinks: first entries that are always chosen.
    """

    name = "minference"
    summary = "reads faster by sparse attention; keeps as snapkv (+snapkv)"
    paper = (
        "MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse "
        "Attention, section 3.2"
    )

    columns: int = 512
    near: int = 512
    observed: int = 64
    sinks: int = 30

    at_least = {"columns": 1, "near": 0, "observed": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("sinks", 0 <= self.sinks <= self.columns, "from 0 to columns")
        if not self.inner.prefilling.exact or self.inner.decoding.cumulative:
            raise SettingError(f"{self.name} holds no {self.inner.spec}: name another method")

    @cached_property
    def prefilling(self) -> Prefilling:
        columns = VerticalSlash(self.columns, self.near, self.observed, self.sinks)
        return replace(self.inner.prefilling, columns=columns)
