"""The contract of a step: however entries are held and tokens taken, logits are those of dense
attention over what the cache holds, and what it holds is what the model makes of each token."""

from contextlib import nullcontext

import pytest
import torch

from kvlite.model.shape import ModelShape
from tests.conftest import ARCHITECTURES, Tiny, make_tiny

from .judge import Judged, Lines, judged, lines_of
from .ways import (
    APPENDING,
    PROMPT,
    STEPS,
    WAYS,
    Proposed,
    Replayed,
    Steps,
    Talk,
    Together,
    Way,
    plain_torch,
)

IDS = [3 + (7 * at * at + 11 * at) % 190 for at in range(PROMPT + STEPS)]
# Largest difference of entries, relative to all of them: what is rounded, by how many bits.
ROUNDED = {"16": 1e-4, "8": 0.02, "k8v4": 0.3, "4": 0.3, "kivi4": 0.3, "2": 1.2, "kivi2": 1.2}


def attended(before: list[Lines], after: list[Lines], shape: ModelShape) -> list[Lines]:
    """What a token attended to: what is there after its step. Where its step cut the layer in the
    end, what was there before and itself; of a chunk that ended with it nothing is left to tell."""
    found: list[Lines] = []
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if shape.windows[index] is not None:
            found.append({head: line for head, line in new.items() if len(line.positions)})
            continue
        found.append(
            {
                head: old[head].joined(line)
                if len(line.positions) < len(old[head].positions)
                else line
                for head, line in new.items()
            }
        )
    return found


def answered(talk: Talk, steps: Steps) -> tuple[list[torch.Tensor], list[list[Lines]]]:
    """Logits after the prompt and each token of the answer, and what each attended to."""
    logits, history = [talk.logits[0]], []
    before = [lines_of(layer) for layer in talk.cache.layers]
    while len(history) < STEPS:
        made = steps.take(IDS[PROMPT + len(history) :])
        after = [lines_of(layer) for layer in talk.cache.layers]
        if len(made) == 1:
            history.append(attended(before, after, talk.model.shape))
        else:  # only appended
            seen = talk.cache.seen - len(made)
            for position in range(seen, talk.cache.seen):
                lines = [
                    {head: line.until(position) for head, line in own.items()} for own in after
                ]
                history.append(lines)
        logits, before = [*logits, *made], after
        assert talk.cache.seen == PROMPT + len(history)
    return logits, history


def holds_what_the_model_makes(
    talk: Talk, way: Way, history: list[list[Lines]], said: Judged
) -> None:
    """Each entry is its token's, as far as it was not rounded or merged on purpose."""
    shape = talk.model.shape
    near = max(ROUNDED[way.bits], ROUNDED[way.stored])
    for number, layers in enumerate(history):
        for index, lines in enumerate(layers):
            if shape.kv_sizes[index].latent:
                continue
            row = PROMPT + number
            for head, line in lines.items():
                own = line.positions == row
                assert int(own.sum()) == 1, "the token sees itself, once"
                assert len({*line.positions.tolist()}) == len(line.positions)
                theirs = said.keys[index][line.asking], said.values[index][head]
                for ours, wanted in zip((line.keys, line.values), theirs, strict=True):
                    torch.testing.assert_close(ours[own], wanted[row][None], atol=1e-4, rtol=1e-4)
                    if "minicache" not in way.method and number in (0, STEPS - 1):
                        wanted = wanted[line.positions]
                        assert (ours - wanted).norm() <= near * wanted.norm(), (index, head)
                if shape.windows[index] is not None:
                    seen = said.visible[index][row].nonzero().flatten()
                    assert line.positions.sort().values.equal(seen), "the window, and all of it"


# What is merged, shared, masked, or cut later than the prompt, so that more than a budget is held.
NOT_CUT = ("full", "minicache", "chai", "minference", "simlayerkv", "kvx:middle=example")


def keeps_to_its_budget(talk: Talk, way: Way, answered: int) -> None:
    full = [talk.cache.layers[index].entries_mean for index in talk.model.shape.full_layers]
    if full and not way.method.startswith(NOT_CUT):
        grown = answered if way.method in APPENDING else 0
        assert sum(full) / len(full) <= way.budget + grown


def keep_the_contract(tiny: Tiny, way: Way, kind: type[Steps]) -> Steps:
    talk = Talk.read(tiny.model, way, IDS[:PROMPT])
    keeps_to_its_budget(talk, way, 0)
    steps = kind(talk)
    logits, history = answered(talk, steps)
    aliases = [dict(layer.head_alias) for layer in talk.cache.layers]
    said = judged(tiny.reference, IDS, history, aliases)
    expected = said.logits[PROMPT - 1 :]
    torch.testing.assert_close(torch.stack(logits), expected, atol=2e-4, rtol=2e-4)
    holds_what_the_model_makes(talk, way, history, said)
    keeps_to_its_budget(talk, way, STEPS)
    return steps


@pytest.mark.cases(30)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("loops", ["compiled", "torch"])
def test_one_token_at_a_time(llama: Tiny, way: Way, loops: str) -> None:
    with plain_torch() if loops == "torch" else nullcontext():
        keep_the_contract(llama, way, Steps)


@pytest.mark.cases(6)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_with_others_that_join_and_leave(llama: Tiny, way: Way) -> None:
    keep_the_contract(llama, way, Together)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    "way", [way for way in WAYS if way.method in APPENDING and way.recall is None], ids=str
)
def test_tokens_that_were_proposed(llama: Tiny, way: Way) -> None:
    keep_the_contract(llama, way, Proposed)


@pytest.mark.cases(6)
@pytest.mark.parametrize("way", [way for way in WAYS if way.recall is None], ids=str)
def test_as_a_recorded_program(llama: Tiny, way: Way) -> None:
    with plain_torch():
        steps = keep_the_contract(llama, way, Replayed)
    assert isinstance(steps, Replayed)
    alone = way.method.startswith(("kvx:middle", "chai", "simlayerkv:threshold=0.3"))
    assert steps.graphs.steps > STEPS // 2 or alone, steps.graphs.reason


# Ways through which every kind of layer goes.
THROUGH: list[tuple[Way, type[Steps]]] = [
    (Way("full"), Proposed),
    (Way("full"), Replayed),
    (Way("h2o"), Together),
    (Way("spans", 60, "4"), Steps),
    (Way("spans", 40, recall=8), Steps),
    (Way("spans", 40, recall=8), Together),
]


# Of quantized latents transformers has no counterpart.
LATENTS = ("deepseek-v2", "deepseek-v3", "glm4-moe-lite")


@pytest.mark.cases(12, 140)
@pytest.mark.parametrize(
    ("name", "way", "kind"),
    [
        pytest.param(name, way, kind, id=f"{name}-{way}-{kind.__name__}")
        for name in sorted(ARCHITECTURES)
        for way, kind in THROUGH
        if way.bits == "16" or name not in LATENTS
    ],
)
def test_every_architecture(name: str, way: Way, kind: type[Steps]) -> None:
    with plain_torch() if kind is Replayed else nullcontext():
        keep_the_contract(make_tiny(name), way, kind)
