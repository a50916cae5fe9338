"""How much memory settings would take, told at once and before anything is loaded."""

from dataclasses import dataclass
from html import escape

from kvlite.config.settings import OPTIONS, Settings
from kvlite.config.units import readable
from kvlite.methods.engine_config import EngineConfig
from kvlite.model.devices import choose_devices
from kvlite.model.source import find_config
from kvlite.model.transformers_lock import load_transformers, making_modules
from kvlite.planner.candidates import planner_here
from kvlite.planner.max_context import reach
from kvlite.planner.plan import Plan
from kvlite.planner.planner import Planner

from .views.live import bar_html

# Tokens that settings are planned for, where a conversation has fewer.
PLANNED = 4096
# What a plan may choose, as it is left open.
_OPEN = {
    name: OPTIONS[name].default for name in ("weights", "stream", "budget", "kv_bits", "chunk")
}


@dataclass(frozen=True)
class MemoryEstimate:
    """What settings would take.

    Attributes:
        plan: for at most as many tokens as the model was trained for.
        asked: how many tokens were asked for.
        longest: the longest text that would fit.
        nearest: where it does not fit, the plan that does if weights, bits, budget and chunk are
            left open; None if none does.
    """

    plan: Plan
    asked: int
    longest: int
    nearest: Plan | None


def estimate(settings: Settings, tokens: int, own_bytes: int) -> MemoryEstimate:
    """What settings would take for a text of so many tokens; in any thread, also while the engine
    loads or answers. Of the device, this process holds `own_bytes`, which would be free for another
    model. Raises a KvliteError if the model cannot be found or planned for."""
    load_transformers()
    folder, devices = find_config(settings.model), choose_devices(settings.device)

    def planner_for(config: EngineConfig) -> Planner:
        return planner_here(config, folder, devices, reads_text=False, freed=own_bytes)

    with making_modules():
        planner = planner_for(EngineConfig.from_settings(settings))
        most = planner.shape.max_context - settings.planned_tokens
        plan, nearest = planner.best(max(1, min(tokens, most))), None
        if not plan.fits:
            opened = planner.config.changed(settings.replace(_OPEN))
            other = planner_for(opened).best(plan.tokens)
            nearest = other if other.fits else None
        return MemoryEstimate(plan, tokens, reach(planner, plan.choice), nearest)


def pages(tokens: int) -> str:
    """So many tokens as people count."""
    count = max(1, round(tokens / 500))
    rounded = count if count < 20 else 5 * round(count / 5)
    return f"about {rounded:,} page{'s' * (rounded != 1)} ({tokens:,} tokens)"


def reads(made: MemoryEstimate) -> str:
    """How long a text a model can read, in a few words."""
    plan = made.plan
    if plan.fits:
        kept = "" if plan.kept >= plan.tokens else ", compressed"
        speed = "" if plan.tokens_per_s is None else f", at most {plan.tokens_per_s:,.0f} tokens/s"
        return f"reads {pages(plan.tokens)}{kept}: {readable(plan.peak_bytes)} of memory{speed}"
    if made.longest:
        return f"reads {pages(made.longest)} here, of {plan.tokens:,} that it was trained for"
    return f"does not fit: {pages(plan.tokens)} take {readable(plan.peak_bytes)}"


def verdict_html(estimate: MemoryEstimate) -> str:
    """Whether the machine has what settings would take, and what to do if not."""
    plan = estimate.plan
    room, peak = plan.room, plan.peak_bytes
    verdict = "fits" if plan.fits else "does not fit"
    offered = f"{readable(peak)} of {readable(room.tensors)}"
    lines = [
        f'<p class="{"fits" if plan.fits else "refused"}" data-peak="{peak}" '
        f'data-offered="{room.tensors}" data-fits="{plan.fits}"><b>{verdict}</b>: '
        f"{plan.tokens:,} tokens take {offered} that {escape(room.name)} offers</p>"
    ]
    if estimate.asked > plan.tokens:
        more = f"{estimate.asked:,} were asked for"
        lines.append(f"<p>The model was trained for no more than that: {more}.</p>")
    if estimate.nearest is not None:
        lines.append(f"<p>The nearest that fits: <b>{escape(_told(estimate.nearest))}</b></p>")
    elif not estimate.longest:
        lines.append("<p>Nothing fits: choose a smaller model, or more memory.</p>")
    return f'<div class="price">{"".join(lines)}</div>'


def _told(plan: Plan) -> str:
    choice = plan.choice
    layers = "" if choice.stream == "off" else f", layers from {choice.stream}"
    return (
        f"weights {choice.weights.name}{layers}, budget {choice.budget}, kv bits {choice.kv_bits}, "
        f"chunk {choice.chunk}: {readable(plan.peak_bytes)}"
    )


def phases_html(estimate: MemoryEstimate) -> str:
    """What takes memory in each phase, the longest text that fits, and the speed to expect."""
    plan, lines = estimate.plan, list[str]()
    scale = max(plan.peak_bytes, plan.room.tensors)
    limit = f'<u style="left:{100 * plan.room.tensors / scale:.2f}%"></u>'
    for phase, items in plan.phases.items():
        total = readable(sum(items.values()))
        bar = bar_html(items.items(), scale, f"to {phase}: {total}", limit)
        name = f"<span>to {escape(phase)}</span>"
        lines.append(f'<div class="phase">{name}{bar}<span>{total}</span></div>')
    names = dict.fromkeys(name for items in plan.phases.values() for name in items)
    legend = "".join(
        f'<span><b data-kind="{escape(name)}"></b>{escape(name)}</span>' for name in names
    )
    lines.append(f'<p class="legend">{legend}</p>')
    if estimate.longest:
        lines.append(f"<p>Longest text that fits so: <b>{estimate.longest:,} tokens</b></p>")
    if plan.tokens_per_s is not None:
        speed = f"{plan.tokens_per_s:,.0f} tokens/s"
        lines.append(f"<p>At most {speed}, by its memory's bandwidth</p>")
    if plan.forecast.host_bytes:
        host = f"{readable(plan.forecast.host_bytes)} of {readable(plan.room.host)}"
        lines.append(f"<p>Host memory for recall: {host} free</p>")
    if plan.changes:
        lines.append(f"<ul>{''.join(f'<li>{escape(why)}</li>' for why in plan.changes)}</ul>")
    return f'<div class="price">{"".join(lines)}</div>'
