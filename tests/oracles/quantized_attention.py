"""Attention over quantized entries, one entry at a time, in float64."""

import numpy as np

from .quantized import hadamard


def restored(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, bits: int) -> np.ndarray:
    """One vector from its bytes `(bytes,)` and its groups' scales and zeros `(groups,)`, still
    rotated."""
    dim = len(codes) * 8 // bits
    vector = np.zeros(dim)
    for channel in range(dim):
        byte, plane = channel % len(codes), channel // len(codes)
        code = int(codes[byte]) // 2 ** (bits * plane) % 2**bits
        group = channel * len(scales) // dim
        vector[channel] = code * float(scales[group]) + float(zeros[group])
    return vector


def naive(
    queries: np.ndarray,
    keys: tuple[np.ndarray, np.ndarray, np.ndarray, int],
    values: tuple[np.ndarray, np.ndarray, np.ndarray, int],
    shift: np.ndarray,
    softcap: float | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output `(batch, heads, rows, dim)`, lse `(batch, heads, rows)` and logits `(batch, heads,
    rows, n)`; keys and values as codes `(batch, heads, n, bytes)`, scales and zeros `(batch,
    heads, groups, n)`, and bits."""
    batch, heads, rows, dim = queries.shape
    count = keys[0].shape[2]
    turn = hadamard(dim)
    out = np.zeros(queries.shape)
    lse = np.full(queries.shape[:3], -np.inf)
    logits = np.full((batch, heads, rows, count), -np.inf)
    for b in range(batch):
        for h in range(heads):
            k, v = (
                [
                    turn @ restored(codes[b, h, e], scales[b, h, :, e], zeros[b, h, :, e], bits)
                    for e in range(count)
                ]
                for codes, scales, zeros, bits in (keys, values)
            )
            for r in range(rows):
                for e in range(count):
                    logit = float(queries[b, h, r].astype(np.float64) @ k[e]) + float(
                        shift[b, h, r]
                    )
                    if softcap is not None:
                        logit = softcap * np.tanh(logit / softcap)
                    logits[b, h, r, e] = logit
                if count:
                    own = logits[b, h, r]
                    weights = np.exp(own - own.max())
                    lse[b, h, r] = own.max() + np.log(weights.sum())
                    out[b, h, r] = sum(
                        w * each for w, each in zip(weights / weights.sum(), v, strict=True)
                    )
    return out, lse, logits
