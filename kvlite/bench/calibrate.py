"""Measure of a model what some methods need to know: ranks of its heads, its lazy layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from threading import Event

import torch
from torch import Tensor

from kvlite.bench.batch_decode import each_token, told
from kvlite.bench.fork import Choice, read_once
from kvlite.engine.prefill import Prefill, Progress
from kvlite.engine.probe import Probe
from kvlite.errors import SettingError, require_uncancelled
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.methods.rank import effective_rank, elbow, spectrum
from kvlite.methods.simlayerkv import SimLayerKV
from kvlite.model.calibration import Calibration
from kvlite.model.files import fingerprint
from kvlite.model.load import LoadedModel

CUE, RECALLED = 16, 32
TOLERANCE = 0.1
LAZY = SimLayerKV()
THRESHOLDS = 8


@dataclass(frozen=True)
class _Layer:
    """What one piece of text shows of one layer.

    Attributes:
        eigenvalues: `(heads, dim)` float64, falling, of each query head.
        lazy_share: attention to sinks and recent tokens.
    """

    eigenvalues: Tensor
    lazy_share: float


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
    progress: Progress | None = None,
    lazy: SimLayerKV = LAZY,
    cancel: Event | None = None,
) -> Calibration:
    """Measure a model on pieces of text.

    Ranks as in "UNComp: Can Matrix Entropy Uncover Sparsity?", section 3.3 and appendix A.4: of
    heads truncated at the elbow, of layers by all eigenvalues, as the curves in its code are. The
    threshold of "SimLayerKV", for which the paper gives no search: the lowest at which the model
    repeats a passage from the middle of a piece, beyond the recent tokens, nearly as surely as
    with the full cache (within 0.1 nats a token).

    Args:
        name: of the model. text_name: of the text.
        pieces: token ids of equal length, as many samples as `pieces_of` made.
        progress: told (pieces done, of how many).
        lazy: what a lazy layer keeps, and how many queries are tested.
        cancel: set to end it before the next chunk goes through a layer.

    Raises:
        Stopped: `cancel` was set.
    """
    with _ended_by(cancel, model):
        return _calibrated(model, name, text_name, pieces, progress, lazy)


@contextmanager
def _ended_by(cancel: Event | None, model: LoadedModel) -> Iterator[None]:
    """While layers ask first whether they are still wanted, whoever runs them."""

    def ask(*_: object) -> None:
        require_uncancelled(cancel)

    hooks = [each.input_layernorm.register_forward_pre_hook(ask) for each in model.layers.modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _calibrated(
    model: LoadedModel,
    name: str,
    text_name: str,
    pieces: list[list[int]],
    progress: Progress | None,
    lazy: SimLayerKV,
) -> Calibration:
    shape = model.shape
    searched = len(shape.full_layers) == shape.layers and len(pieces[0]) > 2 * lazy.recent
    total = len(pieces) * (1 + searched)
    layers: list[list[_Layer]] = []
    for done, piece in enumerate(pieces):
        layers.append(list(_measured(model, piece, lazy)))
        if progress is not None:
            progress(done + 1, total)
    shares = [fmean(each[i].lazy_share for each in layers) for i in range(shape.layers)]
    spectra = torch.stack([torch.stack([layer.eigenvalues for layer in each]) for each in layers])
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
    oom_policy = _oom_policy(shares)
    nats: list[list[float]] = []
    for done, piece in enumerate(pieces):
        nats.append(_recall(model, piece, [replace(lazy, threshold=each) for each in oom_policy]))
        if progress is not None:
            progress(len(pieces) + done + 1, total)
    means = [fmean(each) for each in zip(*nats, strict=True)]
    harmless = [
        each for each, mean in zip(oom_policy, means, strict=True) if mean <= means[-1] + TOLERANCE
    ]
    return replace(calibration, lazy_threshold=min(harmless))


def _measured(model: LoadedModel, piece: list[int], lazy: SimLayerKV) -> Iterator[_Layer]:
    shape = model.shape
    ids = torch.tensor([piece], device=model.device)
    policies = [LayerPolicy(Probe(len(piece)), len(piece), window) for window in shape.windows]
    run = Prefill(model, model.empty_cache(), ids, policies)
    for index in range(shape.layers):
        view = run.read_layer(index).view(index)
        yield _Layer(
            spectrum(view.window.queries[0]).cpu(),
            lazy.attention_to_line(
                view.head_groups, view.window.last(lazy.last), lazy.sinks + lazy.recent
            ),
        )


def _oom_policy(shares: list[float]) -> list[float]:
    """Thresholds to try, rising: 0, which makes all layers lazy, some between those of the layers,
    and 1, which makes none."""
    ordered = sorted(shares)
    places = sorted({len(ordered) * step // THRESHOLDS for step in range(1, THRESHOLDS)} - {0})
    return [0.0, *(round((ordered[at - 1] + ordered[at]) / 2, 4) for at in places), 1.0]


def _recall(model: LoadedModel, piece: list[int], methods: list[SimLayerKV]) -> list[float]:
    """Nats a token of a passage that a piece of text held, begun once more after it, for each
    method."""
    at = len(piece) // 4
    prompt = [*piece, *piece[at : at + CUE]]
    passage = piece[at + CUE : at + CUE + RECALLED]
    choices = [Choice(method, len(piece)) for method in methods]
    branches = read_once(model, prompt, choices, reserve=RECALLED)
    nats: list[list[float]] = [[] for _ in branches]

    def judge(index: int, at: int, logits: Tensor) -> None:
        for _, token, row in each_token(passage, at, logits):
            nats[index].append(-float(row.log_softmax(-1)[token]))

    told(model, branches, passage, judge)
    return [fmean(each) for each in nats]
