"""What takes memory on this machine. The style sheet gives each kind of part its color."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise

from kvlite.config.units import readable
from kvlite.planner.usage import Place

from ..engine.active_conversation import Figures
from ..engine.disk import NOTHING, DiskUse
from ..engine.live import Sample

_WIDTH, _HEIGHT = 320, 96
# Seconds that the plot goes back.
_SPAN = 300
# With fewer samples there is no line to see.
_FEW = 3


def live_html(samples: Sequence[Sample], owner: str, here: str, disk: DiskUse = NOTHING) -> str:
    """The model, what takes memory, whose conversation is in it, figures and a plot.

    Args:
        samples: at least one; the last is of now.
        owner: the user who looks, and learns nothing of others' conversations but their bytes.
        here: the conversation that is shown beside it.
        disk: what the user's conversations take there.
    """
    whose = _whose(samples[-1], owner, here)
    samples = [_seen_by(owner, each) for each in samples]
    now = samples[-1]
    parts = [
        f'<p class="model">Model: <b>{escape(now.model) or "not loaded yet"}</b></p>',
        *(_place(place) for place in now.places),
        f'<p class="whose">In memory: {whose}</p>',
        _figures(now.figures) if now.figures is not None else "",
        _disk(disk),
        _plot(samples),
    ]
    return f'<div class="live">{"".join(parts)}</div>'


def _seen_by(owner: str, sample: Sample) -> Sample:
    """A sample without what another user's conversation read and kept, and what was given up."""
    if sample.figures is None or sample.figures.owner == owner:
        return sample
    places = [
        replace(place, parts=tuple(replace(part, about="") for part in place.parts))
        for place in sample.places
    ]
    return replace(sample, places=places, figures=None, title="")


def _place(place: Place) -> str:
    used, total = readable(place.used), readable(place.total)
    taken = ((part.name, part.nbytes) for part in place.parts[:-1])
    bar = bar_html(taken, place.total, f"{place.name}: {used} of {total} used")
    rows = "".join(
        f'<tr data-part="{escape(part.name)}" data-bytes="{part.nbytes}">'
        f'<td><b data-kind="{escape(part.name)}"></b></td>'
        f"<th scope=row>{escape(part.name)}</th><td>{readable(part.nbytes)}</td>"
        f"<td>{escape(part.about)}</td></tr>"
        for part in place.parts
        if part.nbytes
    )
    return (
        f'<section class="place" data-place="{escape(place.short)}" data-used="{place.used}" '
        f'data-total="{place.total}">'
        f"<h2>{escape(place.short)} <span>{used} of {total}</span></h2>"
        f"{bar}<table>{rows}</table></section>"
    )


def bar_html(parts: Iterable[tuple[str, int]], scale: int, label: str, more: str = "") -> str:
    """Names and bytes side by side, on a scale of bytes; `label` is the bar in words, for screen
    readers, and `more` is HTML that is drawn over it."""
    cells = "".join(
        f'<i data-kind="{escape(name)}" style="width:{100 * nbytes / scale:.3f}%" '
        f'title="{escape(name)}: {readable(nbytes)}"></i>'
        for name, nbytes in parts
        if nbytes
    )
    return f'<div class="bar" role="img" aria-label="{escape(label)}">{cells}{more}</div>'


def _whose(now: Sample, owner: str, here: str) -> str:
    """Which conversation is in memory, as far as the user may know."""
    figures = now.figures
    empty = figures is not None and not (figures.seen or figures.reading)
    if empty or (figures is None and now.opening is None):
        return "no conversation"
    if owner != (figures.owner if figures is not None else now.opening):
        return "another user's conversation"
    if figures is None:
        return f"<b>{escape(now.title)}</b>, which is being opened"
    return f"<b>{'this conversation' if figures.id == here else escape(now.title)}</b>"


def _disk(use: DiskUse) -> str:
    if not use.talks:
        return ""
    several = f"{use.talks:,} conversations" if use.talks > 1 else "1 conversation"
    free = f", {readable(use.free)} free"
    return f'<p class="disk">On disk: {several}, {readable(use.nbytes)}{free}</p>'


def _figures(now: Figures) -> str:
    rows = "".join(
        f'<div data-figure="{name}" data-value="{value}"><dt>{label}</dt><dd>{text}</dd></div>'
        for name, label, value, text in _rows(now)
    )
    return f'<dl class="figures">{rows}</dl>'


def _rows(now: Figures) -> Iterator[tuple[str, str, float, str]]:
    if now.reading:
        yield "reading", "Reading", now.reading, f"{now.reading:,} tokens"
        if now.kv_bytes:
            yield "kv", "KV kept so far", now.kv_bytes, readable(now.kv_bytes)
    elif now.seen:
        yield "seen", "Context", now.seen, f"{now.seen:,} of {now.most:,} tokens"
        kv, full = now.kv_bytes, now.full_kv_bytes
        against = f" of {readable(full)}" if kv < full else ""
        yield "kv", "KV cache", kv, f"{readable(kv)}{against}"
    if now.host_kv_bytes:
        yield "host_kv", "Offloaded", now.host_kv_bytes, readable(now.host_kv_bytes)
    if speed := now.tokens_per_s:
        yield "speed", "Speed", round(speed, 2), f"{speed:.1f} tokens/s"
    if (first := now.first_token_s) is not None:
        yield "first", "First token after", round(first, 2), f"{first:.1f} s"


def _plot(samples: Sequence[Sample]) -> str:
    now, total = samples[-1].at, samples[-1].places[0].total
    if not total:
        return ""
    kept = [each for each in samples if now - each.at <= _SPAN]
    if len(kept) < _FEW:
        return ""
    name = escape(samples[-1].places[0].short)
    high = min(total, 1.2 * max(each.places[0].used for each in kept))
    used = _line(kept, high, [each.places[0].used for each in kept])
    mine = _line(kept, high, [each.mine for each in kept])
    fallbacks = "".join(_fallbacks(kept))
    return (
        f'<figure class="plot"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{name} over the last five minutes" preserveAspectRatio="none">'
        f'<polyline class="used" points="{used}"/><polyline class="mine" points="{mine}"/>'
        f"{fallbacks}</svg><figcaption><b class='mine'></b>kvlite <b class='used'></b>all "
        f"that is used; the last 5 minutes, up to {readable(high)}</figcaption></figure>"
    )


def _x(at: float, now: float) -> float:
    return _WIDTH * (1 - (now - at) / _SPAN)


def _line(samples: Sequence[Sample], high: float, values: Sequence[int]) -> str:
    return " ".join(
        f"{_x(each.at, samples[-1].at):.1f},{_HEIGHT * (1 - min(1.0, value / high)):.1f}"
        for each, value in zip(samples, values, strict=True)
    )


def _fallbacks(samples: Sequence[Sample]) -> Iterator[str]:
    for before, after in pairwise(samples):
        one, other = before.figures, after.figures
        if one is None or other is None or one.id != other.id:
            continue
        new = other.fallbacks[len(one.fallbacks) :]
        if new:
            x = _x(after.at, samples[-1].at)
            yield (
                f'<line class="fallback" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_HEIGHT}">'
                f"<title>{escape(', '.join(new))}</title></line>"
            )
