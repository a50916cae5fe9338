"""The embedded model, for real: transformers' answers, bytes that are freed, needles found."""

from pathlib import Path
from typing import Any

import pytest
import torch

import kvlite
from kvlite.bench.fork import Choice
from kvlite.bench.niah import Niah
from kvlite.bench.prose import bundled_prose
from kvlite.bench.questions import ask
from kvlite.bench.rows import tallies
from kvlite.bench.speed import peak_over_weights, run_reference
from kvlite.bench.task import measure
from kvlite.memory.meter import TensorMeter
from kvlite.methods import parse_method
from kvlite.model.calibration import find_calibration

# Also longer than a chunk that goes through a layer at once.
LENGTHS = [30, pytest.param(1100, marks=pytest.mark.long)]


def greedy(reference: Any, ids: list[int], count: int) -> list[int]:
    """What transformers says."""
    return greedy_with_logits(reference, ids, count)[0]


def greedy_with_logits(
    reference: Any, ids: list[int], count: int
) -> tuple[list[int], torch.Tensor]:
    """Likewise, and its logits after the prompt."""
    prompt = torch.tensor([ids])
    with torch.no_grad():
        out = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return out.sequences[0, len(ids) :].tolist(), out.logits[0]


@pytest.mark.parametrize("length", LENGTHS)
def test_full_says_what_transformers_says(
    smollm: kvlite.Runner, smollm_reference: Any, prose: list[int], length: int
) -> None:
    """Its logits after the prompt, and then token by token."""
    ids, talk = prose[:length], smollm.conversation(method="full")
    pieces = talk.stream_tokens(ids, max_new_tokens=32, ignore_eos=True)
    first = next(pieces)
    assert talk.context.turn is not None
    ours = talk.context.turn.logits.clone()
    said, theirs = greedy_with_logits(smollm_reference, ids, 32)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert [first.token_id, *(piece.token_id for piece in pieces)] == said


@pytest.mark.long
def test_a_second_turn_says_what_transformers_says(
    smollm: kvlite.Runner, smollm_reference: Any
) -> None:
    """Through the chat template, on the cache of the first turn."""
    talk = smollm.conversation(method="full", max_new_tokens=24)
    turns = ["Name a city in France.", "And one in Italy?"]
    messages: list[dict[str, str]] = []
    for turn in turns:
        said = [piece.token_id for piece in talk.stream(turn)]
        messages.append({"role": "user", "content": turn})
        rendered = smollm.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids = smollm.tokenizer.encode(rendered, add_special_tokens=False)
        assert said == greedy(smollm_reference, ids, len(said))
        text = smollm.tokenizer.decode(said, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text})
    assert talk.messages == messages


@pytest.mark.long
def test_what_is_dropped_is_freed(
    smollm: kvlite.Runner, smollm_reference: Any, prose: list[int]
) -> None:
    """With a fourteenth of the entries: 8% of the bytes, 30% of transformers' peak."""
    ids = prose[:2000]
    theirs = peak_over_weights(smollm_reference, lambda: run_reference(smollm_reference, ids, 1))
    talk = smollm.conversation(method="kvx", budget="144", recall="off")
    with TensorMeter(smollm.model.module.parameters()) as meter:
        weights = meter.live
        talk.read(ids)
        left = meter.live - weights
    held = talk.cache.nbytes
    assert 0 < held <= 0.08 * smollm.shape.full_kv_bytes(len(ids), itemsize=4)
    assert held <= left <= held + 4 * smollm.shape.vocab + 4096  # and the logits
    assert held < meter.peak - weights <= 0.30 * theirs


@pytest.mark.long
def test_the_default_finds_what_full_finds(smollm: kvlite.Runner) -> None:
    """At 2,000 tokens with an eighth of the entries; entries at random find nothing."""
    choices = [
        Choice(parse_method(spec), 256) for spec in ("full", smollm.settings.method, "random")
    ]
    task = Niah(
        tokens=[2000], methods=[], budgets=[256], kv_bits=["16"], question="known", depths=6,
        kinds=["number"], repeats=1,
    )  # fmt: skip
    made = task.prompts(smollm.tokenizer, bundled_prose())
    prompts = [each for each in made if each.depth in (0.0, 0.8)]
    rows = measure(ask(smollm.model, prompts, choices, ["known"]))
    found = {
        tally.rows[0].method.split(":")[0]: sum(tally.values("hit")) for tally in tallies(rows)
    }
    assert found == {"full": 2, "spans": 2, "random": 0}


def test_the_embedded_model_comes_calibrated(
    smollm: kvlite.Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVLITE_DATA", str(tmp_path))
    found = find_calibration(smollm.model_path)
    assert found is not None and found == smollm.model.calibration
    assert len(found.head_ranks) == 30 and {len(heads) for heads in found.head_ranks} == {3}
    assert found.lazy_threshold is not None and 0.5 < found.lazy_threshold < 1


@pytest.mark.long
def test_weights_are_to_the_bit_those_that_transformers_reads(
    smollm: kvlite.Runner, smollm_reference: Any
) -> None:
    ours = smollm.model.module.state_dict()
    theirs = smollm_reference.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
