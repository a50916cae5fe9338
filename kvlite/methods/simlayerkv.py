"""SimLayerKV: layers that attend only to the first and the recent tokens keep only these."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from kvlite.errors import SettingError
from kvlite.methods.base import LayerView, Method
from kvlite.methods.capabilities import Across, Decoding, Needs, ResolveLayer
from kvlite.methods.scores import Window
from kvlite.methods.streaming import Streaming
from kvlite.methods.types import KVHeadGroup, Selection
from kvlite.methods.wrapper import Wrapper
from kvlite.model.calibration import Calibration
from kvlite.model.shape import ModelShape

_BY_FAMILY = {"llama": 0.9, "mistral": 0.8, "qwen2": 0.85}


@dataclass(frozen=True)
class SimLayerKV(Wrapper):
    """Tests each layer for laziness, trims lazy layers to sinks and window, and leaves the others
    to another method: `simlayerkv+kvx`; without one, they keep everything.

    A layer is lazy if its attention to the entries that it would keep exceeds the threshold,
    averaged over heads and queries (sections 5.1 and 5.2). If it is tested during prefill, it is
    trimmed before the next layer runs, so the peak falls, too. If it is tested at the first step of
    the answer, as in the paper's main results, the full cache exists until then. The paper's
    thresholds are Llama-3-8B-Instruct 0.9, Mistral-7B-Instruct 0.8, Llama-2-7B-chat 0.65, and in
    its code Qwen2.5-3B 0.85. It does not say how to find one; `kvlite calibrate` does.

    Attributes:
        threshold: attention above which a layer is lazy; 0 trims all, 1 none; "auto" takes the
            calibrated one, else the paper's for models of this family.
        sinks: first entries that a lazy layer keeps.
        recent: last entries that a lazy layer keeps; fewer if the budget is smaller.
        last: queries that are tested in prefill.
        detect: "prefill", when a layer was read, or "decode", at the first step of an answer.
        own: count a token's attention to itself. The paper's code does so at the first step, but
            not in its variant for prefill.
        bound_decode: let a lazy layer's window slide while answering; the paper lets it grow.
    """

    name = "simlayerkv"
    summary = "lazy layers keep first and latest tokens; rest as kvx (+kvx)"
    paper = "SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction, section 5"

    threshold: float | Literal["auto"] = "auto"
    sinks: int = 4
    recent: int = 1024
    last: int = 32
    detect: Literal["prefill", "decode"] = "prefill"
    own: bool = True
    bound_decode: bool = False

    at_least = {"sinks": 0, "recent": 1, "last": 1}
    compresses = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold != "auto":
            self.require("threshold", 0 <= self.threshold <= 1, "from 0 to 1, or auto")
        across = self.inner.across
        unfit = across.resolving is not None or across.merging is not None
        unfit |= self.inner.needs.first > 0
        if unfit or not self.inner.prefilling.exact:
            raise SettingError(f"{self.name} holds no {self.inner.spec}: name another method")
        self.require(
            "detect",
            self.detect == "prefill" or not self.inner.compresses,
            f"prefill with {self.inner.name}, which cuts its layers before an answer begins",
        )

    def fitted(self, shape: ModelShape, calibration: Calibration | None) -> Method:
        inner = self.inner.fitted(shape, calibration)
        if self.threshold != "auto":
            return replace(self, inner=inner)
        found = None if calibration is None else calibration.lazy_threshold
        if found is None and shape.model_type not in _BY_FAMILY:
            whole = len(shape.full_layers) == shape.layers
            once = "run `kvlite calibrate MODEL` once, or " if whole else ""
            raise SettingError(
                f"{self.name} knows no threshold for {shape.model_type} models: {once}give one "
                "(simlayerkv:threshold=0.8)"
            )
        threshold = _BY_FAMILY[shape.model_type] if found is None else found
        return replace(self, inner=inner, threshold=threshold)

    @cached_property
    def across(self) -> Across:
        when: Literal["read", "step"] = "read" if self.detect == "prefill" else "step"
        resolving = ResolveLayer(when, self.resolve, self.sinks + self.recent)
        return replace(self.inner.across, resolving=resolving)

    @property
    def min_budget(self) -> int:
        return max(self.sinks + 1, self.inner.min_budget)

    @cached_property
    def needs(self) -> Needs:
        inner = self.inner.needs
        return replace(
            inner,
            queries=lambda budget: max(self.last, inner.num_queries(budget)),
            attention=True,
        )

    @property
    def needs_calibration(self) -> bool:
        return self.inner.needs_calibration or self.threshold == "auto"

    @cached_property
    def decoding(self) -> Decoding:
        inner = self.inner.decoding
        evict = inner.evict if self.bound_decode else None
        return replace(inner, evict=evict, drops=self.bound_decode or not inner.append_only)

    @property
    def respects_budget(self) -> bool:
        return self.inner.compresses and self.inner.respects_budget

    def select(self, view: LayerView) -> list[Selection]:
        raise AssertionError("simlayerkv leaves selection to others")

    def resolve(self, view: LayerView) -> tuple[Method, int]:
        """Section 5.1: sink and window if the layer is lazy, else the method it holds."""
        line = min(self.sinks + self.recent, view.budget)
        if line <= self.sinks or min(head_group.used for head_group in view.head_groups) <= line:
            return self.inner, view.budget
        share = self.attention_to_line(view.head_groups, view.window.last(self.last), line)
        assert self.threshold != "auto"
        if share <= self.threshold:
            return self.inner, view.budget
        return Streaming(self.sinks, roll=self.bound_decode), line

    def attention_to_line(self, head_groups: list[KVHeadGroup], window: Window, line: int) -> float:
        """The share of its attention that a layer pays to the sinks and the window, `line` entries:
        the mean over query heads and rows, and the least of a batch's sequences."""
        import torch

        shares = []
        for head_group in head_groups:
            for head in range(len(head_group.heads)):
                positions = window.to_scoring_device(
                    head_group.positions[:, head, : head_group.used]
                )
                near = window.distances(positions) - (0 if self.own else 1)
                inside = (near >= 0) & (near < line - self.sinks)
                inside |= positions[:, None] < self.sinks
                each = [
                    (part * inside[:, None, rows, : part.shape[3]]).sum(-1)
                    for rows, part in window.blocks(head_group, head)
                ]
                shares.append(torch.cat(each, 2).mean((1, 2)))
        return torch.stack(shares).mean(0).amin().item()
