"""What an answer was made from, and what it cost: the account every front end shows."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvlite.cache.bits import UNCHANGED
from kvlite.config.units import readable

FinishReason = Literal["stop", "length", "interrupted", "memory"]

_PLACES = {"ram": "in RAM", "disk": "on disk"}


@dataclass(frozen=True)
class GenerationMetrics:
    """Accounting of one answer, as it stands.

    Attributes:
        finish_reason: "stop" (the model ended, or a stop string), "length", "interrupted",
            "memory" (it ran out, and nothing was left to give up); None while the answer goes on.
        notes: what the user should know of these settings, a sentence each; that recall cannot
            begin, once a conversation.
        fallbacks: what was given up in this turn because memory was short.
        model, device, weights, method: what was used.
        dtype: of activations, and of the cache where it is not quantized.
        kv_bits: how keys and values were quantized, as it was written; "16" if they were not.
        budget: mean entries a KV head and layer that were allowed.
        prompt_tokens: tokens read for this answer.
        again_tokens: of an earlier answer, read once more with them, since it was drawn from what
            the cache held then.
        seen_tokens: tokens the conversation has read and written.
        generated_tokens: tokens of the answer.
        kept_entries_mean: entries held, mean over layers and KV heads.
        kv_bytes: bytes of the cache's storage.
        index_bytes: beside that, for finding what is to be recalled.
        host_kv_bytes: host memory, or disk, in which everything is kept, to be recalled.
        host_kv_place: "ram" or "disk"; "" if nothing is.
        recalled_bytes: entries that were brought back into the cache while answering, in its bytes.
        recall_hit_rate: the share of those that tokens wanted which were there already; None
            where tokens did not look for any.
        full_kv_bytes: bytes of keys and values if nothing were dropped.
        streamed_bytes: bytes of weights that came to the device for this answer.
        peak_bytes: peak memory, weights included.
        planned_peak_bytes: what live tensors on the device were expected to come to, before
            anything was read; None where that could not be told, or is not worth it.
        phase_peak_bytes, planned_phase_bytes: likewise of reading and answering ("read", "answer");
            empty where they are not known.
        plan_error: by which part of the peak that was too much, where the peak is that of tensors,
            not of the process.
        score_bytes_to_host, score_bytes_back: what was copied to choose on the host, scores or
            logits there and indices back; None where the device chose.
        score_s: seconds spent in choosing, the device's part included; likewise.
        time_to_first_token_s, prefill_tokens_per_s, decode_tokens_per_s: speed.
    """

    finish_reason: FinishReason | None
    notes: tuple[str, ...]
    fallbacks: tuple[str, ...]
    model: str
    device: str
    weights: str
    dtype: str
    method: str
    kv_bits: str
    budget: int
    prompt_tokens: int
    again_tokens: int
    seen_tokens: int
    generated_tokens: int
    kept_entries_mean: float
    kv_bytes: int
    index_bytes: int
    host_kv_bytes: int
    host_kv_place: str
    recalled_bytes: int
    recall_hit_rate: float | None
    full_kv_bytes: int
    streamed_bytes: int
    peak_bytes: int
    planned_peak_bytes: int | None
    phase_peak_bytes: dict[str, int]
    planned_phase_bytes: dict[str, int]
    plan_error: float | None
    score_bytes_to_host: int | None
    score_bytes_back: int | None
    score_s: float | None
    time_to_first_token_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float

    def to_json(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)

    def line(self) -> str:
        """One line for people."""
        kept, seen = self.kept_entries_mean, self.seen_tokens
        if kept < seen:
            held = f"kept {kept:,.0f} of {seen:,} ({self.kept_shown}) with {self.method}"
            size = f"KV{self._quantized} {readable(self.kv_bytes)}"
            if self.kv_bytes < self.full_kv_bytes:
                size += f" of {readable(self.full_kv_bytes)}"
        else:
            held, size = f"kept all {seen:,}", f"KV{self._quantized} {readable(self.kv_bytes)}"
            if self.kv_bytes < self.full_kv_bytes:
                held += f" with {self.method}"
                size += f" of {readable(self.full_kv_bytes)}"
        again = f" and {self.again_tokens:,} again" if self.again_tokens else ""
        streamed = (
            [f"brought {readable(self.streamed_bytes)} of weights"] if self.streamed_bytes else []
        )
        parts = [
            f"read {self.prompt_tokens:,} tokens{again}",
            held,
            size,
            *self._recalled,
            *streamed,
            f"peak {readable(self.peak_bytes)}{self._planned}",
            *self._chosen_on_host,
            *self.course,
        ]
        if self.finish_reason == "length":
            parts.append("stopped at the length limit")
        if self.finish_reason == "interrupted":
            parts.append("interrupted")
        if self.finish_reason == "memory":
            parts.append("ended for lack of memory")
        return " · ".join(parts)

    @property
    def kept_shown(self) -> str:
        """The share of the conversation that the cache holds, for people."""
        kept, seen = self.kept_entries_mean, self.seen_tokens
        return f"{100 if kept >= seen else min(99, round(100 * kept / seen))}%"

    @property
    def course(self) -> list[str]:
        """How the answer went, for people: whether memory was short, and how fast it came."""
        short = [f"memory was short: {', '.join(self.fallbacks)}"] if self.fallbacks else []
        first = f"first token {self.time_to_first_token_s:.1f} s"
        further = [f"{self.decode_tokens_per_s:.1f} tokens/s"] if self.generated_tokens > 1 else []
        return [*short, first, *further]

    @property
    def _planned(self) -> str:
        if self.plan_error is None or self.planned_peak_bytes is None:
            return ""
        return f" (planned {readable(self.planned_peak_bytes)}, {self.plan_error:+.1%})"

    @property
    def _recalled(self) -> list[str]:
        if not self.host_kv_bytes:
            return []
        everything = f"{readable(self.host_kv_bytes)} {_PLACES[self.host_kv_place]}"
        if not self.recalled_bytes:
            return [f"all {everything}"]
        return [f"recalled {readable(self.recalled_bytes)} from {everything}"]

    @property
    def _chosen_on_host(self) -> list[str]:
        there, back, seconds = self.score_bytes_to_host, self.score_bytes_back, self.score_s
        if not there or back is None or seconds is None:
            return []
        return [f"chosen on the host, {readable(there + back)} moved, {seconds:.1f} s"]

    @property
    def _quantized(self) -> str:
        if self.kv_bits == UNCHANGED:
            return ""
        return f" in {self.kv_bits}" + (" bits" if self.kv_bits.isdigit() else "")


@dataclass(frozen=True)
class Piece:
    """A piece of an answer as it streams: a token, the text that became certain, the account. Where
    memory runs out, the last piece has no token."""

    token_id: int | None
    text: str
    metrics: GenerationMetrics


@dataclass(frozen=True)
class Answer:
    """A whole answer.

    Attributes:
        text: without special tokens and stop strings.
        token_ids: every generated token, the ending one included.
        metrics: what it was made from.
    """

    text: str
    token_ids: list[int]
    metrics: GenerationMetrics

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended."""
        return self.metrics.finish_reason

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cache's storage at the end."""
        return self.metrics.kv_bytes

    @property
    def full_kv_bytes(self) -> int:
        """Bytes of keys and values if nothing were dropped."""
        return self.metrics.full_kv_bytes
