"""An answer's ledger in words."""

from collections.abc import Iterator

from kvlite.config.units import readable
from kvlite.conversation.metrics import Ledger

_ENDS = {
    "stop": "The model ended it.",
    "length": "It ended at the longest answer allowed, which {longer} changes.",
    "interrupted": "You ended it; what had come was kept.",
    "memory": "It ended for lack of memory, with nothing left to give up.",
}
# Where someone at a terminal has longer answers.
_LONGER = "/set max-tokens"
_PLACES = {"ram": "host memory", "disk": "a temporary file"}


def brief(ledger: Ledger, longer: str = _LONGER) -> str:
    """The line under an answer: what it was made from, how fast it came, how it ended if that is
    not usual.

    Args:
        longer: what lets answers be longer.
    """
    parts = [_kept(ledger)]
    if ledger.recalled_bytes:
        parts.append(f"{readable(ledger.recalled_bytes)} recalled")
    parts += ledger.course
    if ledger.finish_reason == "length":
        parts.append(f"ended at the length limit ({longer})")
    if ledger.finish_reason == "interrupted":
        parts.append("interrupted; the part is kept")
    if ledger.finish_reason == "memory":
        parts.append("ended for lack of memory")
    return " · ".join(parts)


def _kept(ledger: Ledger) -> str:
    kept, seen = ledger.kept_entries_mean, ledger.seen_tokens
    if kept >= seen:
        return f"from all {seen:,} tokens"
    return f"from {kept:,.0f} of {seen:,} tokens ({ledger.kept_shown})"


def told(ledger: Ledger, longer: str = _LONGER) -> Iterator[str]:
    """Sentences, one on each thing that a reader may want to know. Args are those of `brief`."""
    again = f", and {ledger.again_tokens:,} of the last answer again" if ledger.again_tokens else ""
    yield (
        f"Read {ledger.prompt_tokens:,} tokens{again}, {ledger.prefill_tokens_per_s:,.0f} a "
        "second; "
        f"the first token came after {ledger.time_to_first_token_s:.1f} s."
    )
    speed = f", {ledger.decode_tokens_per_s:.1f} a second" if ledger.generated_tokens > 1 else ""
    ended = _ENDS.get(ledger.finish_reason or "", "").format(longer=longer)
    yield f"Answered {ledger.generated_tokens:,} tokens{speed}. {ended}".rstrip()
    yield from _held(ledger)
    yield from _recalled(ledger)
    yield from _memory(ledger)
    if ledger.streamed_bytes:
        yield f"{readable(ledger.streamed_bytes)} of weights came to the device for it."
    if ledger.score_s is not None and ledger.score_bytes_to_host:
        moved = ledger.score_bytes_to_host + (ledger.score_bytes_back or 0)
        yield (
            f"What stays was chosen on the host: {readable(moved)} moved, {ledger.score_s:.1f} s."
        )
    yield f"Model: {ledger.model}, {ledger.weights} weights, on {ledger.device}."
    for note in ledger.notes:
        yield f"Note: {note}."


def _held(ledger: Ledger) -> Iterator[str]:
    seen, kept = ledger.seen_tokens, ledger.kept_entries_mean
    bits = "" if ledger.kv_bits == "16" else f" in {ledger.kv_bits} bits"
    size = f"{readable(ledger.kv_bytes)} of keys and values{bits}"
    if kept >= seen:
        yield f"It was made from all {seen:,} tokens of the conversation: {size}."
        return
    yield (
        f"The cache holds {kept:,.0f} of {seen:,} tokens, {ledger.kept_shown}, on average over "
        f"layers and heads: {size}, where everything would take {readable(ledger.full_kv_bytes)}."
    )
    yield f"They were chosen by {ledger.method_shown}, {ledger.budget:,} a head allowed."


def _recalled(ledger: Ledger) -> Iterator[str]:
    if not ledger.tier_bytes:
        if ledger.kept_entries_mean < ledger.seen_tokens:
            yield "What was dropped is gone: nothing is kept for recall."
        return
    place = _PLACES[ledger.tier_place]
    yield f"All that was read stays in {place} ({readable(ledger.tier_bytes)}) for the next turn."
    if ledger.recall_hit_rate is not None:
        yield (
            f"While answering, {readable(ledger.recalled_bytes)} were brought back from there; "
            f"{ledger.recall_hit_rate:.0%} of what tokens wanted was in the cache already."
        )


def _memory(ledger: Ledger) -> Iterator[str]:
    planned = ""
    if ledger.planned_peak_bytes and ledger.plan_error is not None:
        planned = f", {readable(ledger.planned_peak_bytes)} planned ({ledger.plan_error:+.1%})"
    yield f"Memory at the peak: {readable(ledger.peak_bytes)}{planned}."
    if ledger.rungs:
        yield f"Memory was short, and was given up: {', '.join(ledger.rungs)}."
