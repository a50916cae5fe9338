"""What a user should know of the settings of a turn, in sentences."""

from importlib.util import find_spec

from kvlite.cache import KVBits
from kvlite.methods.rules import Rule
from kvlite.model.load import LoadedModel

SMALL_MODEL, LONG = 1_000_000_000, 32_768


def notes(model: LoadedModel, rules: list[Rule], seen: int) -> tuple[str, ...]:
    """What speaks against a turn's settings, and what makes it slow; nothing, mostly.

    Args:
        rules: one a layer.
        seen: tokens read by the end of this turn.
    """
    bits = rules[0].bits
    return () if bits is None else (*_lossy(bits, model, seen), *_slow(bits, model, rules))


def _lossy(bits: KVBits, model: LoadedModel, seen: int) -> list[str]:
    if min(bits.keys, bits.values) > 4:
        return []
    said, weights = [], sum(model.shape.parameters.values())
    few = f"{min(bits.keys, bits.values)}-bit keys and values"
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


def _slow(bits: KVBits, model: LoadedModel, rules: list[Rule]) -> list[str]:
    name, said = rules[-1].method.spec, []
    if any(rule.mask is not None for rule in rules):
        said.append(f"{name} restores a quantized layer for every token, which is slow")
    if model.device.type != "cuda":
        return said
    if find_spec("triton") is None:
        said.append(
            "triton is not installed, so quantized entries are attended to in many small steps, "
            "which is slow: pip install triton"
        )
    elif bits.by_channel or any(rule.partner is not None for rule in rules):
        what = "--kv-bits kivi" if bits.by_channel else name
        said.append(f"{what} has no kernel: its entries are attended to in many small steps")
    return said
