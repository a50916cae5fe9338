"""How answers end, and what goes on with those that a limit cut."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvlite.conversation.metrics import GenerationMetrics

FinishReason = Literal["stop", "length", "interrupted", "memory"]

# What `ended` says unless a limit was met.
_ENDS: dict[FinishReason | None, tuple[str, str, str]] = {
    None: ("", "", ""),
    "stop": ("", "", "The model ended it."),
    "interrupted": (
        "interrupted",
        "interrupted; the part is kept",
        "You ended it; what had come was kept.",
    ),
    "memory": (
        "ended for lack of memory",
        "ended for lack of memory",
        "It ended for lack of memory, with nothing left to give up.",
    ),
}


@dataclass(frozen=True)
class Remedies:
    """What goes on with an answer that was cut, in the words of a front end.

    Attributes:
        goes_on: what the user does then.
        longer: the setting that allows longer answers.
        compacts: the setting that lets a conversation forget when its context is full.
    """

    goes_on: str
    longer: str
    compacts: str


TERMINAL = Remedies("/continue", "/set max-tokens", "/set beyond-context compact")


def ended(metrics: "GenerationMetrics", remedies: Remedies) -> tuple[str, str, str]:
    """How an answer ended: in a line about it, in a shorter one with what to do, and as a
    sentence."""
    if metrics.finish_reason != "length":
        return _ENDS[metrics.finish_reason]
    goes_on, count = remedies.goes_on, f"{metrics.generated_tokens:,} tokens"
    if metrics.limit != "context":
        # What follows a schema cannot go on where it was cut.
        after = ("", "") if metrics.failure else (f": {goes_on} goes on", f"; {goes_on} goes on")
        return (
            "stopped at the length limit",
            f"cut at {count} ({remedies.longer}){after[0]}",
            f"It ended at the longest answer allowed, {count}, which {remedies.longer} changes"
            f"{after[1]}.",
        )
    first = "" if metrics.compacts else f"{remedies.compacts}, then "
    on = f"{first}{goes_on} goes on and forgets the oldest part"
    return (
        "stopped as the context was full",
        f"the context is full: {on}",
        f"It ended as the context was full: {on}.",
    )


def cut(metrics: "GenerationMetrics") -> str:
    """What limit an answer met, and what to do, where it cannot go on; "" if it met none, or
    that was said as a failure."""
    if metrics.finish_reason != "length" or metrics.failure:
        return ""
    if metrics.limit == "context":
        return (
            f"The answer was cut, as the model's context of {metrics.seen_tokens + 1:,} tokens is "
            "full: ask about less, or in kvlite chat --beyond-context compact, where /continue "
            "goes on and forgets the oldest part."
        )
    return (
        f"The answer was cut at {metrics.generated_tokens:,} tokens: raise --max-tokens or leave "
        "it out, or ask in kvlite chat, where /continue goes on."
    )
