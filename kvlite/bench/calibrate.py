"""Measure what some methods need to know of a model: ranks of its heads, its lazy layers."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor

from kvlite.bench.batch_decode import surprise
from kvlite.bench.fork import Choice, read_turns
from kvlite.engine.callbacks import Progress
from kvlite.engine.prefill import Prefill
from kvlite.engine.probe import Probe, probing
from kvlite.engine.slices import in_one_go
from kvlite.errors import SettingError
from kvlite.methods.rank import effective_rank, elbow, spectrum
from kvlite.methods.simlayerkv import SimLayerKV
from kvlite.model.calibration import Calibration
from kvlite.model.files import fingerprint
from kvlite.model.load import LoadedModel

CUE, RECALLED = 16, 32
TOLERANCE = 0.1
LAZY = SimLayerKV()
THRESHOLDS = 8


def pieces_of(model: LoadedModel, text: str, samples: int, tokens: int) -> list[list[int]]:
    """Pieces of a text, evenly spread, overlapping where it is short.

    Raises:
        SettingError: the text is shorter than one piece, or a piece than the model's context.
    """
    ids: list[int] = model.tokenizer.encode(text, add_special_tokens=False)
    longest = model.shape.max_context - RECALLED
    if tokens + CUE > longest:
        raise SettingError(f"--tokens {tokens} is too long for this model: give {longest - CUE}")
    if len(ids) < tokens:
        raise SettingError(
            f"the text has {len(ids):,} tokens, fewer than --tokens {tokens}: give a longer one, "
            "or fewer tokens"
        )
    last = len(ids) - tokens
    starts = [last * index // max(1, samples - 1) for index in range(samples)]
    return [ids[start : start + tokens] for start in starts]


@torch.inference_mode()
def calibrate(
    model: LoadedModel,
    name: str,
    text_name: str,
    pieces: list[list[int]],
    progress: Progress = lambda done, total: None,
    lazy: SimLayerKV = LAZY,
) -> Calibration:
    """Measure a model on pieces of text.

    Ranks as in "UNComp: Can Matrix Entropy Uncover Sparsity?", section 3.3 and appendix A.4: of
    heads truncated at the elbow, of layers by all eigenvalues, as the curves in its code are. The
    threshold of "SimLayerKV", for which the paper gives no search: the lowest at which the model
    repeats a passage from the middle of a piece, beyond the recent tokens, nearly as surely as
    with the full cache (within 0.1 nats a token).

    Args:
        pieces: token ids of equal length, as `pieces_of` makes them.
        progress: called with pieces done, and of how many.
        lazy: what a lazy layer keeps, and how many queries are tested.
    """
    shape = model.shape
    if len({*shape.kv_sizes}) > 1:
        raise SettingError(
            f"calibration compares all layers, and this {shape.model_type} model's have heads of "
            "two sizes: choose a method that needs none (kvlite methods)"
        )
    searched = len(shape.full_layers) == shape.layers and len(pieces[0]) > 2 * lazy.recent
    total = len(pieces) * (1 + searched)
    measured: list[list[tuple[Tensor, float]]] = []
    for done, piece in enumerate(pieces, 1):
        measured.append(list(_layers(model, piece, lazy)))
        progress(done, total)
    shares = [fmean(share for _, share in layer) for layer in zip(*measured, strict=True)]
    spectra = torch.stack([torch.stack([each for each, _ in layers]) for layers in measured])
    count = elbow(spectra.mean((0, 1, 2)))
    group = shape.heads // shape.kv_heads
    ranks = effective_rank(spectra, count).unflatten(-1, (shape.kv_heads, group)).mean(-1)
    by_layer = effective_rank(spectra, shape.head_dim).mean((0, 2))
    order = ranks.argsort(-1, descending=True).argsort(-1)
    wins = (order < max(1, shape.kv_heads // 2)).sum(0)
    calibration = Calibration(
        model=name,
        fingerprint=fingerprint(model.path),
        text=text_name,
        samples=len(pieces),
        tokens=len(pieces[0]),
        max_context=shape.max_context,
        layer_ranks=tuple(round(rank, 4) for rank in by_layer.tolist()),
        elbow=count,
        head_ranks=tuple(tuple(round(rank, 4) for rank in each) for each in ranks.mean(0).tolist()),
        head_wins=tuple(map(tuple, wins.tolist())),
        lazy_shares=tuple(round(share, 4) for share in shares),
        lazy_threshold=None,
    )
    if not searched:
        return calibration
    thresholds = _thresholds(shares)
    methods = [replace(lazy, threshold=each) for each in thresholds]
    nats: list[list[float]] = []
    for done, piece in enumerate(pieces, len(pieces) + 1):
        nats.append(_recall(model, piece, methods))
        progress(done, total)
    means = [fmean(each) for each in zip(*nats, strict=True)]
    harmless = (
        threshold
        for threshold, mean in zip(thresholds, means, strict=True)
        if mean <= means[-1] + TOLERANCE
    )
    return replace(calibration, lazy_threshold=min(harmless))


def _layers(
    model: LoadedModel, piece: list[int], lazy: SimLayerKV
) -> Iterator[tuple[Tensor, float]]:
    """Of each layer, the falling eigenvalues of every query head, `(heads, dim)` float64, and the
    share of attention to sinks and recent tokens."""
    shape = model.shape
    ids = torch.tensor([piece], device=model.device)
    run = Prefill(model, model.empty_cache(), ids, probing(shape, Probe(len(piece))))
    for index in range(shape.layers):
        view = in_one_go(run.read_layer(index)).view(index)
        window, ends = view.window.last(lazy.last), lazy.sinks + lazy.recent
        share = lazy.attention_to_line(view.head_groups, window, ends)
        yield spectrum(view.window.queries[0]).cpu(), share


def _thresholds(shares: list[float]) -> list[float]:
    """Thresholds to try, rising: 0, which makes all layers lazy, some between those of the layers,
    and 1, which makes none."""
    ordered = sorted(shares)
    places = sorted({len(ordered) * step // THRESHOLDS for step in range(1, THRESHOLDS)} - {0})
    return [0.0, *(round((ordered[at - 1] + ordered[at]) / 2, 4) for at in places), 1.0]


def _recall(model: LoadedModel, piece: list[int], methods: list[SimLayerKV]) -> list[float]:
    """For each method, nats a token of a passage of a piece, when it is begun again after the
    piece."""
    at = len(piece) // 4
    prompt = [*piece, *piece[at : at + CUE]]
    passage = piece[at + CUE : at + CUE + RECALLED]
    choices = [Choice(method, len(piece)) for method in methods]
    branches = read_turns(model, [prompt], choices, reserve=RECALLED)
    return surprise(model, branches, passage, range(len(passage)))
