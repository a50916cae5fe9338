"""What a turn has come to at one moment, from which metrics are made once somebody asks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from kvlite.cache.bits import written
from kvlite.conversation.endings import FinishReason
from kvlite.conversation.metrics import GenerationMetrics
from kvlite.memory.meter import PeakMeter
from kvlite.offload import HostKVStore, Recall
from kvlite.offload.kv.store import HostKVLayer

if TYPE_CHECKING:
    from kvlite.conversation.turn import Turn


@dataclass(frozen=True)
class Figures:
    """What an answer has come to at one moment. It holds no tensors, so anybody may keep it.

    Attributes:
        counted: fields of `GenerationMetrics`, of that moment.
        account: of the whole answer.
    """

    counted: dict[str, Any]
    account: "Account"

    def changed(self, **counted: Any) -> "Figures":
        """The same with some fields changed."""
        return replace(self, counted=self.counted | counted)

    def metrics(self, reason: FinishReason | None, reasoning_tokens: int) -> GenerationMetrics:
        """All metrics of an answer that has ended for a reason, or goes on."""
        account = self.account
        return GenerationMetrics(
            finish_reason=reason,
            reasoning_tokens=reasoning_tokens,
            full_kv_bytes=account.full_kv_bytes(self.counted["seen_tokens"]),
            **account.fixed,
            **self.counted,
            **account.measured(),
        )


class Account:
    """What pieces of one answer have in common.

    What costs more than a token may, or waits for the device, is measured when somebody asks; once
    the answer has ended, that was the last time.

    Attributes:
        fixed: fields of `GenerationMetrics` that do not change any more.
        full_kv_bytes: of so many tokens.
    """

    def __init__(self, turn: "Turn") -> None:
        """Of a turn that was read."""
        model, config, stats = turn.model, turn.turn_config, turn.run_stats
        shape, itemsize, settings = model.shape, model.dtype.itemsize, turn.settings
        self.full_kv_bytes = partial(shape.full_kv_bytes, itemsize=itemsize)
        self.fixed: dict[str, Any] = {
            "compacts": settings.beyond_context == "compact",
            "model": settings.model,
            "device": " and ".join(map(str, model.all_devices)),
            "weights": model.weights.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "method": config.method.spec,
            "budget": config.budget,
            "prompt_tokens": stats.before + len(turn.ids),
            "again_tokens": len(turn.again),
            "ahead_tokens": turn.ahead[0],
            "ahead_s": turn.ahead[1],
            "layers": shape.layers,
            "recurrent_layers": shape.recurrent_layers,
            "state_bytes": turn.cache.state_bytes,
            "planned_peak_bytes": stats.planned,
            "planned_phase_bytes": stats.planned_phases,
            "prefill_tokens_per_s": (stats.before + len(turn.again) + len(turn.ids)) / stats.read_s,
        }
        entry_bytes = shape.kv_size.entry_bytes(itemsize)
        measure = partial(_measured, stats.meter, stats.planned, turn.recall, entry_bytes)
        self._meter = stats.meter
        self._measure: Callable[[], dict[str, Any]] | None = measure
        self._last: dict[str, Any] = {}
        self._stored: tuple[list[ref[HostKVLayer]], dict[str, Any]] = [], {}

    def figures(self, turn: "Turn", reason: FinishReason | None) -> Figures:
        """Of this moment, in which the answer goes on, or ends for a reason."""
        cache, stats, graphs = turn.cache, turn.run_stats, turn.graphs
        counted: dict[str, Any] = {
            "limit": turn.turn_config.limited_by if reason == "length" else "",
            "failure": turn.failure,
            "notes": turn.notes,
            "fallbacks": turn.fallbacks,
            "kv_bits": written(turn.policies[0].bits),
            "seen_tokens": cache.seen,
            "kept_entries_mean": cache.entries_mean,
            "kv_bytes": cache.nbytes,
            "graph_steps": None if graphs is None else graphs.steps,
            "no_graph": "" if graphs is None else graphs.reason,
            "together": turn.together,
            **stats.counted(),
        }
        if turn.backend is not None:
            counted |= turn.backend.figures()
        if turn.speculation is not None:
            counted |= turn.speculation.figures()
        if turn.store is not None:
            counted |= self._of_store(turn.store)
        if reason is not None:
            self.end(reason)
        return Figures(counted, self)

    def measured(self) -> dict[str, Any]:
        """Fields of `GenerationMetrics`, of now or of the answer's end."""
        measure = self._measure
        return self._last if measure is None else measure()

    def end(self, reason: FinishReason | None = None) -> None:
        """Measure for the last time. An answer without a reason was left."""
        if self._measure is None:
            return
        self._last, self._measure = self._measure(), None
        if reason is not None:
            self._meter.end_phase("answer")
            self._last["phase_peak_bytes"] = {**self._meter.phases}

    def _of_store(self, store: HostKVStore) -> dict[str, Any]:
        """Sizes of the host store, measured anew once one of its layers was replaced by one that
        has grown."""
        known, figures = self._stored
        layers = store.layers
        same = len(known) == len(layers)
        if not (same and all(each() is own for each, own in zip(known, layers, strict=True))):
            figures = {
                "index_bytes": store.index_bytes,
                "host_kv_bytes": store.nbytes,
                "host_kv_place": "disk" if store.on_disk else "ram",
            }
            self._stored = [*map(ref, layers)], figures
        return figures


def _measured(
    meter: PeakMeter, planned: int | None, recall: Recall | None, entry_bytes: int
) -> dict[str, Any]:
    """The peak, and what was recalled; `entry_bytes` is one entry of one KV head."""
    peak = meter.peak_bytes
    measured: dict[str, Any] = {
        "peak_bytes": peak,
        "peak_of": "tensors" if meter.of_tensors else "process",
        "phase_peak_bytes": {**meter.phases},
        "plan_error": planned / peak - 1 if planned and meter.of_tensors else None,
    }
    if recall is not None:
        fetched, requested = recall.num_fetched, recall.num_requested  # may wait for the device
        measured["recalled_bytes"] = fetched * entry_bytes
        measured["recall_hit_rate"] = 1 - fetched / requested if requested else None
    return measured
