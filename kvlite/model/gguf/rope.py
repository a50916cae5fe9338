"""Rotary positions as GGUF files have them, in transformers' words.

Source: llama.cpp's converter and its `llm_build_*`; "YaRN: Efficient Context Window Extension"
(sections 3.1 to 3.4); "LongRoPE" (section 3); Llama 3.1's scaling as transformers computes it.
"""

from math import inf, isclose, log, pi, sqrt
from typing import Any

from kvlite.model.gguf.metadata import Metadata

# Frequencies that do not turn at all (Gemma 4) are divided by this.
_STILL = 1e29
_KINDS = (None, "none", "linear", "yarn", "longrope")


def rope_parameters(
    file: Metadata,
    config: dict[str, Any],
    *,
    theta: float | None = None,
    log_multiplier: float = 1.0,
    partial: bool = False,
) -> dict[str, Any]:
    """transformers' `rope_parameters` of the layers that see everything.

    Args:
        config: what is known of it so far, with `head_dim`.
        theta: the base where the file does not say it.
        partial: whether a part of a head may be rotated.
        log_multiplier: what a file's `yarn_log_multiplier` is, of `mscale_all_dim`.
    """
    head_dim = config["head_dim"]
    base = float(file.number("rope.freq_base", theta or 10_000.0))
    if base <= 0:
        raise file.wrong("rope.freq_base", "it must be above 0")
    made: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    dims = file.size("rope.dimension_count", head_dim)
    if dims != head_dim and (not partial or dims > head_dim):
        raise file.wrong("rope.dimension_count", f"a head has {head_dim}")
    if dims != head_dim:
        made["partial_rotary_factor"] = dims / head_dim
    kind = file.value("rope.scaling.type")
    if kind not in _KINDS:
        raise file.wrong("rope.scaling.type", "it must be none, linear, yarn or longrope")
    factor = float(file.number("rope.scaling.factor", 0) or file.number("rope.scale_linear", 0))
    is_scaled = kind == "yarn" or (kind in (None, "linear") and factor not in (0, 1))
    original = file.whole("rope.scaling.original_context_length", 0)
    long, short = (file.numbers(f"rope_factors_{each}.weight") for each in ("long", "short"))
    divisors = file.numbers("rope_freqs.weight")
    if (long is None) != (short is None) or (kind == "longrope" and long is None):
        raise file.wrong("rope.scaling.type", "rope_factors_long and _short belong together")
    if (is_scaled or divisors is not None) and (
        long is not None or (is_scaled and divisors is not None)
    ):
        raise file.wrong("rope.scaling.type", "positions would be scaled in two ways")
    if long is not None and short is not None:
        return made | _longrope(file, long, short, original)
    if divisors is not None:
        return made | _divided(divisors, base, dims)
    if kind == "yarn":
        return made | _yarn(file, factor, original, log_multiplier)
    return made | ({"rope_type": "linear", "factor": factor} if is_scaled else {})


def _longrope(
    file: Metadata, long: list[float], short: list[float], original: int
) -> dict[str, Any]:
    context = file.size("context_length")
    original = original or context
    if original < 2:
        raise file.wrong("rope.scaling.original_context_length", "it must be 2 or more")
    share = context / original
    said = sqrt(1 + log(share) / log(original)) if share > 1 else 1.0
    return {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": original,
        "attention_factor": float(file.number("rope.scaling.attn_factor", said)),
    }


def _yarn(file: Metadata, factor: float, original: int, log_multiplier: float) -> dict[str, Any]:
    made: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor or 1.0,
        "original_max_position_embeddings": original or file.whole("context_length"),
        "beta_fast": float(file.number("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": float(file.number("rope.scaling.yarn_beta_slow", 1.0)),
    }
    if file.number("rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise file.wrong("rope.scaling.yarn_ext_factor", "kvlite knows 1 only")
    if multiplier := float(file.number("rope.scaling.yarn_log_multiplier", 0.0)):
        # Published models have the same number for both.
        made["mscale"] = made["mscale_all_dim"] = multiplier / log_multiplier
    elif attention := float(file.number("rope.scaling.yarn_attn_factor", 0.0)):
        made["attention_factor"] = attention
    return made


def _divided(divisors: list[float], theta: float, dims: int) -> dict[str, Any]:
    still = sum(each > _STILL for each in divisors)
    if still:  # the first ones turn, as far as the share says
        turning = len(divisors) - still
        if any(each != 1 for each in divisors[:turning]):
            return _exactly(divisors)
        return {"rope_type": "proportional", "partial_rotary_factor": turning / len(divisors)}
    if all(each == 1 for each in divisors):
        return {}
    return _llama3(divisors, theta, dims) or _exactly(divisors)


def _exactly(divisors: list[float]) -> dict[str, Any]:
    """The same for every length: longrope whose two lists are one."""
    return {
        "rope_type": "longrope",
        "long_factor": divisors,
        "short_factor": divisors,
        "original_max_position_embeddings": 1 << 30,
        "attention_factor": 1.0,
    }


def _llama3(divisors: list[float], theta: float, dims: int) -> dict[str, Any] | None:
    """The numbers behind Llama 3's divisors, if these are such.

    A frequency is divided by 1 where its wave is short, by `factor` where it is long, and between
    them by what makes its share of both linear in the frequency. Of the two limits and the original
    length only ratios matter, so the lower limit is 1.
    """
    factor = max(divisors)
    turns = [theta ** (-2 * at / dims) / (2 * pi) for at in range(len(divisors))]
    between = [
        (turn, (1 / each - 1 / factor) / (1 - 1 / factor))
        for turn, each in zip(turns, divisors, strict=True)
        if 1.0001 < each < factor * 0.9999
    ]
    if len(between) < 2:
        return None
    (first, high_share), (last, low_share) = between[0], between[-1]
    slope = (high_share - low_share) / (first - last)
    offset = high_share - slope * first
    if slope <= 0 or offset >= 0:
        return None
    high = _rounded(1 - 1 / offset)
    original = _rounded(slope * (high - 1))
    for turn, each in zip(turns, divisors, strict=True):
        share = min(1.0, max(0.0, (original * turn - 1) / (high - 1)))
        if not isclose(1 / ((1 - share) / factor + share), each, rel_tol=2e-6):
            return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": int(original),
    }


def _rounded(number: float) -> float:
    """The whole number that is meant; files have 7 digits of what it was computed from."""
    whole = round(number) if number < inf else 0
    return float(whole) if isclose(whole, number, rel_tol=1e-4) else number
