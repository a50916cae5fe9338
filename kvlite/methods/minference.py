"""MInference: reading a long text while looking only at columns of it and at what is near."""

from dataclasses import dataclass, replace
from functools import cached_property

from kvlite.errors import SettingError
from kvlite.methods.capabilities import Prefilling, VerticalSlash
from kvlite.methods.wrapper import Wrapper


@dataclass(frozen=True)
class MInference(Wrapper):
    """Reads faster: of what lies further back, the tokens of a chunk look only at those entries
    that the chunk's last queries look at most. What is kept is up to the method it holds, written
    after a plus sign: `minference+snapkv`; alone, everything.

    This is the paper's vertical-slash pattern. There the last 64 queries of the whole prompt choose
    columns and diagonals for every query head; here those of each chunk choose columns for every KV
    head, the diagonals are the near ones, and all that is computed is dense, so that any attention
    kernel serves. A text is read approximately: its logits are not the full cache's. Chunks that
    see no more than these entries, or have no more rows than vote, are read exactly.

    Attributes:
        columns: entries further back that a chunk looks at.
        near: entries before a chunk that it looks at in any case.
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
