"""Metrics in words."""

from collections.abc import Iterator

from kvlite.config.units import readable
from kvlite.conversation.metrics import GenerationMetrics

_ENDS = {
    "stop": "The model ended it.",
    "length": "It ended at the longest answer allowed, which {longer} changes.",
    "interrupted": "You ended it; what had come was kept.",
    "memory": "It ended for lack of memory, with nothing left to give up.",
}
# How to get longer answers at a terminal.
_LONGER = "/set max-tokens"
_PLACES = {"ram": "host memory", "disk": "a temporary file"}


def brief(metrics: GenerationMetrics, longer: str = _LONGER) -> str:
    """The line under an answer.

    Args:
        longer: the setting that allows longer answers.
    """
    parts = [_kept(metrics)]
    if metrics.recalled_bytes:
        parts.append(f"{readable(metrics.recalled_bytes)} recalled")
    parts += metrics.course
    if metrics.finish_reason == "length":
        parts.append(f"ended at the length limit ({longer})")
    if metrics.finish_reason == "interrupted":
        parts.append("interrupted; the part is kept")
    if metrics.finish_reason == "memory":
        parts.append("ended for lack of memory")
    return " · ".join(parts)


def _kept(metrics: GenerationMetrics) -> str:
    kept, seen = metrics.kept_entries_mean, metrics.seen_tokens
    if kept >= seen:
        return f"from all {seen:,} tokens"
    return f"from {kept:,.0f} of {seen:,} tokens ({metrics.kept_shown})"


def told(metrics: GenerationMetrics, longer: str = _LONGER) -> Iterator[str]:
    """The metrics in sentences. Args are those of `brief`."""
    again = (
        f", and {metrics.again_tokens:,} of the last answer again" if metrics.again_tokens else ""
    )
    yield (
        f"Read {metrics.prompt_tokens:,} tokens{again}, "
        f"{metrics.prefill_tokens_per_s:,.0f} a second; "
        f"the first token came after {metrics.time_to_first_token_s:.1f} s."
    )
    speed = f", {metrics.decode_tokens_per_s:.1f} a second" if metrics.generated_tokens > 1 else ""
    ended = _ENDS.get(metrics.finish_reason or "", "").format(longer=longer)
    yield f"Answered {metrics.generated_tokens:,} tokens{speed}. {ended}".rstrip()
    yield from _held(metrics)
    yield from _recalled(metrics)
    yield from _memory(metrics)
    if metrics.streamed_bytes:
        yield f"{readable(metrics.streamed_bytes)} of weights came to the device for it."
    if metrics.score_s is not None and metrics.score_bytes_to_host:
        moved = metrics.score_bytes_to_host + (metrics.score_bytes_back or 0)
        yield (
            f"What stays was chosen on the host: {readable(moved)} moved, {metrics.score_s:.1f} s."
        )
    yield f"Model: {metrics.model}, {metrics.weights} weights, on {metrics.device}."
    for note in metrics.notes:
        yield f"Note: {note}."


def _held(metrics: GenerationMetrics) -> Iterator[str]:
    seen, kept = metrics.seen_tokens, metrics.kept_entries_mean
    bits = "" if metrics.kv_bits == "16" else f" in {metrics.kv_bits} bits"
    size = f"{readable(metrics.kv_bytes)} of keys and values{bits}"
    if kept >= seen:
        yield f"It was made from all {seen:,} tokens of the conversation: {size}."
        return
    yield (
        f"The cache holds {kept:,.0f} of {seen:,} tokens, {metrics.kept_shown}, on average over "
        f"layers and heads: {size}, where everything would take {readable(metrics.full_kv_bytes)}."
    )
    yield f"They were chosen by {metrics.method}, {metrics.budget:,} a head allowed."


def _recalled(metrics: GenerationMetrics) -> Iterator[str]:
    if not metrics.host_kv_bytes:
        if metrics.kept_entries_mean < metrics.seen_tokens:
            yield "What was dropped is gone: nothing is kept for recall."
        return
    place = _PLACES[metrics.host_kv_place]
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
