"""What is being done, in a line below the conversation."""

import time
from html import escape

from kvlite.web.work import Shown

from ..words import spoken


def status_html(shown: Shown) -> str:
    """Notes for the user, and an error or a progress bar with the time left."""
    parts = [f'<p class="note">{_escaped(note)}</p>' for note in shown.notes]
    if shown.error:
        parts.append(f'<p class="refused" role="alert">{_escaped(shown.error)}</p>')
    elif not shown.ended:  # it changes too often to be read out
        parts.append(f'<div aria-live="off">{_doing(shown)}</div>')
    return f'<div class="status">{"".join(parts)}</div>'


def _escaped(text: str) -> str:
    return escape(spoken(text))


def _doing(shown: Shown) -> str:
    if shown.before:
        others = "another one goes" if shown.before == 1 else f"{shown.before} others go"
        return f'<p class="doing">Waiting: {escape(shown.behind or f"{others} first")}</p>'
    if shown.metrics is not None and not shown.title:
        speed = shown.metrics.decode_tokens_per_s
        count = shown.metrics.generated_tokens
        told = f"{count:,} token{'s' * (count != 1)}"
        doing = "Answering" if shown.text or not shown.reasoning else "Thinking"
        return f'<p class="doing">{doing}: {told}{f", {speed:.1f} a second" if speed else ""}</p>'
    told = escape(shown.title)
    if shown.total:
        told += f" · {shown.done / shown.total:.0%}"
    left = shown.seconds_left(time.monotonic())
    if left is not None:
        told += f" · {span(left)} left"
    value = f'value="{shown.done}" max="{shown.total}"' if shown.total else ""
    return f'<p class="doing">{told}</p><progress {value}></progress>'


def span(seconds: float) -> str:
    """So much time, for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def sentence_html(text: str, *, wrong: bool = False) -> str:
    """A sentence, as a note or an error."""
    if not text:
        return ""
    kind = 'class="refused" role="alert"' if wrong else 'class="note"'
    return f'<div class="status"><p {kind}>{_escaped(text)}</p></div>'
