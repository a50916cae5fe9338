"""Which models fit a card of 24 GB: the table of docs/models.md, from published configs alone.

Run it with `python -m tests.models_table > docs/models.md`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from kvlite.config.settings import Settings
from kvlite.config.units import readable
from kvlite.errors import KvliteError
from kvlite.planner.candidates import open_planner
from kvlite.planner.held_weights import HeldWeights
from kvlite.planner.plan import Plan
from tests.configs import PUBLISHED

CONTEXTS = (8_192, 32_768, 131_072)
CARD, NAME = "24GiB", "RTX 4090"

INTRODUCTION = f"""# Models on a card of 24 GB

What kvlite chooses by itself for texts of some 8,000, 32,000 and 131,000 tokens on a card of
{CARD} (an {NAME}): the first of its choices that fits, as `kvlite plan` shows it. Each cell has
the format of the weights, the format of the KV cache if it is quantized, and the peak of the
card's memory. *Layers from ram* means that layers are loaded one after another for every token,
which is slow; the figure in brackets is the host memory for them. In models with experts, only
those experts are loaded that a token is routed to and that are not *there*, that is, on the
card already: half of the memory that a plan leaves free holds experts and the weights that
every token uses, and the peak includes it. *Too long* means longer than the context that the
model was trained for. Recall is on, so host memory also holds all keys and values.

All figures are plans: nothing here was run on a card, and no limit of host memory was assumed.
Models with latent attention (GLM-4.7-Flash, DeepSeek-V3) keep one latent vector and its rotated
part per token: 1.2 KB a layer in 16 bits, where the keys and values of all heads would take 20
and 82 KB. Parameters are counted from the configs in `tests/configs.py`, which says which of
them were written from memory. `python -m tests.models_table > docs/models.md` generates this
page.

"""


def table() -> Iterator[str]:
    """The lines of the page's table."""
    yield "| model | parameters | " + " | ".join(f"{tokens:,}" for tokens in CONTEXTS) + " |"
    yield "|---|---|" + "---|" * len(CONTEXTS)
    for name, config in PUBLISHED.items():
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            try:
                yield _row(name, folder)
            except KvliteError as error:
                yield f"| {name} | refused: {str(error).removeprefix(folder)} |" + " |" * len(
                    CONTEXTS
                )


def _row(name: str, folder: str) -> str:
    planner = open_planner(Settings(model=folder, vram=CARD), card=NAME)
    count = sum(planner.shape.parameters.values())
    cells = []
    for tokens in CONTEXTS:
        longest = planner.shape.max_context
        if tokens > longest:
            cells.append("too long")
            continue
        made = planner.best(min(tokens, longest - planner.settings.max_new_tokens))
        there = sum(planner.shape.weight_bytes(made.choice.weights).values())
        cells.append(_cell(made, there, planner.held))
    return f"| {name} | {count / 1e9:.2f} B | " + " | ".join(cells) + " |"


def _cell(plan: Plan, weight_bytes: int, held: HeldWeights) -> str:
    if not plan.fits:
        return f"does not fit ({readable(plan.peak_bytes)})"
    choice = plan.choice
    streamed = (
        ""
        if choice.stream == "off"
        else f", layers from {choice.stream} ({readable(weight_bytes)})"
    )
    if streamed and held.experts:
        streamed += f", {held.slots(plan.resident) / held.experts:.0%} of experts there"
    kept = "" if choice.kv_bits == "16" else f", KV in {choice.kv_bits} bits"
    return f"{choice.weights.name}{streamed}{kept}: {readable(plan.peak_bytes)}"


if __name__ == "__main__":
    print(INTRODUCTION + "\n".join(table()))
