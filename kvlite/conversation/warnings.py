"""Notes on the settings of a turn: what makes it slow, large or worse."""

from importlib.util import find_spec

from kvlite.cache import KVBits
from kvlite.cache.quantized import has_compiled
from kvlite.config.units import readable
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.model.layers import Passing
from kvlite.model.load import LoadedModel

SMALL_MODEL, LONG = 1_000_000_000, 32_768


def notes(model: LoadedModel, policies: list[LayerPolicy], seen: int) -> tuple[str, ...]:
    """Sentences, mostly none; `policies` are one a layer, `seen` counts this turn's tokens."""
    bits = policies[0].bits
    passing = model.layers.passing
    return (
        *([] if passing is None else [_streamed(passing)]),
        *([] if bits is None else [*_lossy(bits, model, seen), *_slow(bits, model, policies)]),
    )


def _streamed(passing: Passing) -> str:
    fastest = passing.bytes_per_s / passing.nbytes
    return (
        f"--stream {passing.setting} brings {readable(passing.nbytes)} of weights to the device "
        f"for every token of the answer: at {readable(int(passing.bytes_per_s))}/s, measured when "
        f"the model was loaded, that allows {fastest:.3g} tokens/s at most"
    )


def _lossy(bits: KVBits, model: LoadedModel, seen: int) -> list[str]:
    fewest = min(bits.keys, bits.values)
    if fewest > 4:
        return []
    sides = [side for side, own in (("keys", bits.keys), ("values", bits.values)) if own <= 4]
    few = f"{fewest}-bit {' and '.join(sides)}"
    said, weights = [], sum(model.shape.parameters.values())
    if weights < SMALL_MODEL:
        said.append(
            f"{few} cost models below 1 billion weights more than larger ones, and this one has "
            f"{weights / 1e9:.2f}: --kv-bits 8 costs nothing that was measured"
        )
    if seen > LONG:
        said.append(
            f"{few} are reported to lose what long texts hold, and this one has {seen:,} tokens, "
            f"more than {LONG:,}: --kv-bits 8 is safer"
        )
    return said


def _slow(bits: KVBits, model: LoadedModel, policies: list[LayerPolicy]) -> list[str]:
    said = []
    masked = next((policy.method.name for policy in policies if policy.mask is not None), None)
    merged = next((policy.method.name for policy in policies if policy.partner is not None), None)
    if masked:
        said.append(f"{masked} restores a quantized layer for every token, which is slow")
    if merged:
        said.append(f"{merged} leaves entries exact in its paired layers until it merges them")
    if model.device.type == "cpu" and not has_compiled(model.device):
        said.append(
            "numba is not installed, so an answer from quantized entries takes longer than from "
            'exact ones: pip install "kvlite[cpu]"'
        )
    if model.device.type != "cuda":
        return said
    if find_spec("triton") is None:
        said.append(
            "triton is not installed, so quantized entries are attended to in many small steps, "
            "which is slow: pip install triton"
        )
    elif bits.by_channel or merged:
        what = f"--kv-bits {bits}" if bits.by_channel else merged
        said.append(f"{what} has no kernel: its entries are attended to in many small steps")
    return said
