"""The metrics of an answer: what it was made from and what it cost, as numbers and in words."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from kvlite.cache.bits import UNCHANGED
from kvlite.config.units import readable
from kvlite.conversation.endings import TERMINAL, FinishReason, Remedies, ended

if TYPE_CHECKING:
    from kvlite.conversation.figures import Figures
    from kvlite.conversation.sources import Source

_PLACES = {"ram": "in RAM", "disk": "on disk"}
_STORES = {"ram": "host memory", "disk": "a temporary file"}


@dataclass(frozen=True, kw_only=True)
class GenerationMetrics:
    """Metrics of one answer, up to now.

    Attributes:
        finish_reason: "stop" (the model ended it, or a stop string), "length", "interrupted",
            "memory" (none was left, and nothing could be given up); None while it goes on.
        limit: of "length" the one that was met: the longest "answer" allowed, or the "context",
            which is full; "" of others.
        compacts: whether a full context is compacted to go on, and the rest forgotten.
        failure: why the answer cannot be used: memory ran out, or its length before what it has to
            follow (`schema`) was whole; "" if it can.
        notes: what the user should know about these settings, one sentence each.
        fallbacks: what was given up in this turn for lack of memory.
        dtype: of activations, and of the cache unless it is quantized.
        kv_bits: the setting; "16" if keys and values are not quantized.
        budget: entries allowed, mean over KV heads and layers.
        prompt_tokens: tokens read for this answer.
        again_tokens: tokens of an earlier answer that were read again with them.
        ahead_tokens, ahead_s: tokens that were read before that, as a document is for several
            questions, and the seconds that took.
        seen_tokens: tokens read and generated in the whole conversation.
        kept_entries_mean: entries held, mean over layers and KV heads.
        kv_bytes: the cache's storage for keys and values.
        state_bytes: what recurrent layers keep, whatever the length.
        layers, recurrent_layers: how many keep keys and values, and a state instead.
        index_bytes: device memory that recall needs to find entries.
        host_kv_bytes: host memory or disk that holds everything, for recall.
        host_kv_place: "ram" or "disk"; "" without recall.
        recalled_bytes: entries brought back into the cache for this answer.
        recall_hit_rate: the share of wanted entries that were in the cache already; None if no
            token looked for any.
        reasoning_tokens: tokens of the answer that are reasoning, those before it was continued
            included.
        decode_steps: passes through the model for what was generated, of one token or several.
        proposed_tokens, accepted_tokens: tokens that went through ahead, and those that then came.
        no_speculation: why none were proposed, or none any more; empty if they may be.
        full_kv_bytes: keys and values if nothing were dropped or quantized.
        streamed_bytes: weights brought to the device for this answer.
        peak_bytes: peak memory, weights included, of what `peak_of` says.
        peak_of: "tensors" on the device; or "process", Python and libraries included, on a CPU that
            was given no limit and was not asked to count them.
        planned_peak_bytes: the peak of live tensors on the device, planned before reading, to be
            compared with a peak of tensors alone; None if unknown, or not worth planning.
        phase_peak_bytes, planned_phase_bytes: likewise for "read" and "answer"; empty if unknown.
        plan_error: (planned - actual) / actual, where the peak is that of tensors rather than of
            the process.
        score_bytes_to_host, score_bytes_back, score_s: scores or logits copied to the host, indices
            copied back, and seconds spent selecting; None where the device selects.
        graph_steps: tokens that a CUDA graph took through the model; None without CUDA.
        no_graph: why the last token was not one of them; "" if it was.
        together: the most answers that took a decode step together, this one included.
    """

    finish_reason: FinishReason | None
    limit: Literal["", "answer", "context"] = ""
    compacts: bool = False
    failure: str = ""
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
    ahead_tokens: int = 0
    ahead_s: float = 0.0
    seen_tokens: int
    generated_tokens: int
    kept_entries_mean: float
    kv_bytes: int
    state_bytes: int = 0
    layers: int = 0
    recurrent_layers: int = 0
    index_bytes: int = 0
    host_kv_bytes: int = 0
    host_kv_place: str = ""
    recalled_bytes: int = 0
    recall_hit_rate: float | None = None
    reasoning_tokens: int = 0
    decode_steps: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    no_speculation: str = ""
    full_kv_bytes: int
    streamed_bytes: int
    peak_bytes: int
    peak_of: Literal["tensors", "process"] = "process"
    planned_peak_bytes: int | None
    phase_peak_bytes: dict[str, int]
    planned_phase_bytes: dict[str, int]
    plan_error: float | None
    score_bytes_to_host: int | None = None
    score_bytes_back: int | None = None
    score_s: float | None = None
    graph_steps: int | None = None
    no_graph: str = ""
    together: int = 1
    time_to_first_token_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON can hold them."""
        return asdict(self)

    def line(self) -> str:
        """A one-line summary."""
        kept, seen = self.kept_entries_mean, self.seen_tokens
        if kept < seen:
            held = f"kept {kept:,.0f} of {seen:,} ({self.kept_shown}) with {self.method}"
        else:
            held = f"kept all {seen:,}"
        size = f"KV{self.quantized} {readable(self.kv_bytes)}"
        if self.kv_bytes < self.full_kv_bytes:
            size += f" of {readable(self.full_kv_bytes)}"
            held += "" if kept < seen else f" with {self.method}"
        if self.recurrent_layers:
            every = self.layers + self.recurrent_layers
            size += f" in {self.layers} of {every} layers, states {readable(self.state_bytes)}"
        again = f" and {self.again_tokens:,} again" if self.again_tokens else ""
        read = f"read {self.prompt_tokens:,} tokens{again}"
        if self.ahead_tokens:
            before = f"read {self.ahead_tokens:,} tokens in {self.ahead_s:.1f} s"
            read = f"{before}, then {self.prompt_tokens:,}{again}"
        parts = [read, held, size, *self._recalled]
        if self.streamed_bytes:
            parts.append(f"brought {readable(self.streamed_bytes)} of weights")
        parts.append(f"peak {readable(self.peak_bytes)}{self._planned}")
        parts += [*self._chosen_on_host, *self.course, ended(self, TERMINAL)[0]]
        return " · ".join(filter(None, parts))

    @property
    def kept_shown(self) -> str:
        """The share of the conversation that the cache holds, as text."""
        kept, seen = self.kept_entries_mean, self.seen_tokens
        return f"{100 if kept >= seen else min(99, round(100 * kept / seen))}%"

    @property
    def course(self) -> list[str]:
        """Whether memory was short, and how fast the answer came, as text."""
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
    def quantized(self) -> str:
        """How many bits keys and values have, as text, if they are quantized."""
        if self.kv_bits == UNCHANGED:
            return ""
        return f" in {self.kv_bits}" + (" bits" if self.kv_bits.isdigit() else "")


@dataclass(frozen=True)
class Piece:
    """A token of an answer, the text that can no longer change, and what it has come to. The last
    piece has no token if memory ran out; if a conversation has documents, it has the passages that
    the answer came from, at most three, the one that was looked at most first.

    Attributes:
        figures: of this moment; metrics are made of them.
        finish_reason: as of `GenerationMetrics`.
        reasoning: text that is reasoning, and no part of `text`; only of answers in words.
        raw: all text, with the control tokens that stand around reasoning and calls.
        reasoning_tokens: as of `GenerationMetrics`.
    """

    token_id: int | None
    text: str
    figures: "Figures"
    finish_reason: FinishReason | None = None
    sources: tuple["Source", ...] = ()
    reasoning: str = ""
    raw: str = ""
    reasoning_tokens: int = 0

    @cached_property
    def metrics(self) -> GenerationMetrics:
        """The metrics so far, made when they are asked for. They are of the moment of the piece,
        whenever that is; but the peak of memory, and what was recalled, are known when they are
        first asked for, or once the answer has ended."""
        return self.figures.metrics(self.finish_reason, self.reasoning_tokens)


@dataclass(frozen=True)
class Answer:
    """A whole answer.

    Attributes:
        text: without special tokens and stop strings.
        token_ids: every generated token, the ending one included.
        metrics: the final ones.
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
        """Bytes of the cache at the end."""
        return self.metrics.kv_bytes

    @property
    def full_kv_bytes(self) -> int:
        """Bytes of keys and values if nothing were dropped or quantized."""
        return self.metrics.full_kv_bytes


def brief(metrics: GenerationMetrics, remedies: Remedies = TERMINAL) -> str:
    """The line under an answer."""
    parts = [_kept(metrics)]
    if metrics.recalled_bytes:
        parts.append(f"{readable(metrics.recalled_bytes)} recalled")
    parts += [*metrics.course, ended(metrics, remedies)[1]]
    return " · ".join(filter(None, parts))


def _kept(metrics: GenerationMetrics) -> str:
    kept, seen = metrics.kept_entries_mean, metrics.seen_tokens
    if kept >= seen:
        return f"from all {seen:,} tokens"
    return f"from {kept:,.0f} of {seen:,} tokens ({metrics.kept_shown})"


def told(metrics: GenerationMetrics, remedies: Remedies = TERMINAL) -> Iterator[str]:
    """The metrics in sentences."""
    again = (
        f", and {metrics.again_tokens:,} of the last answer again" if metrics.again_tokens else ""
    )
    yield (
        f"Read {metrics.prompt_tokens:,} tokens{again}, "
        f"{metrics.prefill_tokens_per_s:,.0f} a second; "
        f"the first token came after {metrics.time_to_first_token_s:.1f} s."
    )
    if metrics.ahead_tokens:
        yield f"Before that, {metrics.ahead_tokens:,} tokens were read in {metrics.ahead_s:.1f} s."
    speed = f", {metrics.decode_tokens_per_s:.1f} a second" if metrics.generated_tokens > 1 else ""
    how = ended(metrics, remedies)[2]
    yield f"Answered {metrics.generated_tokens:,} tokens{speed}. {how}".rstrip()
    if metrics.proposed_tokens:
        yield (
            f"{metrics.accepted_tokens:,} of {metrics.proposed_tokens:,} draft tokens were "
            f"accepted, so that it took {metrics.decode_steps:,} steps."
        )
    yield from _held(metrics)
    yield from _recurrent(metrics)
    yield from _recalled(metrics)
    yield from _memory(metrics)
    if metrics.streamed_bytes:
        yield f"{readable(metrics.streamed_bytes)} of weights came to the device for it."
    if metrics.score_s is not None and metrics.score_bytes_to_host:
        moved = metrics.score_bytes_to_host + (metrics.score_bytes_back or 0)
        yield (
            f"Entries were chosen on the host: {readable(moved)} moved, {metrics.score_s:.1f} s."
        )
    if metrics.graph_steps:
        yield f"A CUDA graph made {metrics.graph_steps:,} of its tokens, with one launch each."
    elif why := metrics.no_graph:
        yield f"The GPU was given one kernel after the other: no CUDA graph, since {why}."
    yield f"Model: {metrics.model}, {metrics.weights} weights, on {metrics.device}."
    for note in metrics.notes:
        yield f"Note: {note}."


def _recurrent(metrics: GenerationMetrics) -> Iterator[str]:
    if metrics.recurrent_layers:
        yield (
            f"{metrics.recurrent_layers} layers keep states of a fixed size instead of keys and "
            f"values, {readable(metrics.state_bytes)} in all: method and budget are for the other "
            f"{metrics.layers}."
        )


def _held(metrics: GenerationMetrics) -> Iterator[str]:
    seen, kept = metrics.seen_tokens, metrics.kept_entries_mean
    size = f"{readable(metrics.kv_bytes)} of keys and values{metrics.quantized}"
    if kept >= seen:
        yield f"It was made from all {seen:,} tokens of the conversation: {size}."
        return
    yield (
        f"The cache holds {kept:,.0f} of {seen:,} tokens, {metrics.kept_shown}, on average over "
        f"layers and heads: {size}, where everything would take {readable(metrics.full_kv_bytes)}."
    )
    yield f"They were chosen by {metrics.method}, with a budget of {metrics.budget:,} a KV head."


def _recalled(metrics: GenerationMetrics) -> Iterator[str]:
    if not metrics.host_kv_bytes:
        if metrics.kept_entries_mean < metrics.seen_tokens:
            yield "What was dropped is gone: nothing is kept for recall."
        return
    place = _STORES[metrics.host_kv_place]
    size = readable(metrics.host_kv_bytes)
    yield f"All that was read stays in {place} ({size}) for the next turn."
    if metrics.recall_hit_rate is not None:
        yield (
            f"While answering, {readable(metrics.recalled_bytes)} were brought back from there; "
            f"{metrics.recall_hit_rate:.0%} of what tokens wanted was in the cache already."
        )


def _memory(metrics: GenerationMetrics) -> Iterator[str]:
    planned = ""
    if metrics.planned_peak_bytes and metrics.plan_error is not None:
        planned = f", {readable(metrics.planned_peak_bytes)} planned ({metrics.plan_error:+.1%})"
    yield f"Memory at the peak: {readable(metrics.peak_bytes)}{planned}."
    if metrics.fallbacks:
        yield f"Memory was short, and was given up: {', '.join(metrics.fallbacks)}."
