"""What is being done, in a line under the conversation."""

import time
from html import escape

from ..engine.work import Shown


def status_html(shown: Shown) -> str:
    """What work shows of itself: a bar, how long it may take, what the user should know."""
    parts = [f'<p class="note">{escape(note)}</p>' for note in shown.notes]
    if shown.error:
        parts.append(f'<p class="refused" role="alert">{escape(shown.error)}</p>')
    elif not shown.ended:  # which changes too often to be read out
        parts.append(f'<div aria-live="off">{_doing(shown)}</div>')
    return f'<div class="status">{"".join(parts)}</div>'


def _doing(shown: Shown) -> str:
    if shown.before:
        why = shown.behind or f"{shown.before} before it"
        return f'<p class="doing">Waiting its turn: {escape(why)}</p>'
    if shown.metrics is not None and not shown.title:
        speed = shown.metrics.decode_tokens_per_s
        told = f"{shown.metrics.generated_tokens:,} tokens"
        return f'<p class="doing">Answering: {told}{f", {speed:.1f} a second" if speed else ""}</p>'
    told = escape(shown.title)
    if shown.total:
        told += f" · {shown.done / shown.total:.0%}"
    left = shown.seconds_left(time.monotonic())
    if left is not None:
        told += f" · {_span(left)} left"
    value = f'value="{shown.done}" max="{shown.total}"' if shown.total else ""
    return f'<p class="doing">{told}</p><progress {value}></progress>'


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def sentence_html(text: str, *, wrong: bool = False) -> str:
    """A sentence of its own."""
    if not text:
        return ""
    kind = 'class="refused" role="alert"' if wrong else 'class="note"'
    return f'<div class="status"><p {kind}>{escape(text)}</p></div>'
