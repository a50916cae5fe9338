"""Plans: arithmetic by hand, what is chosen when memory is short, and that it then fits."""

import json
import shutil
from dataclasses import replace
from itertools import combinations_with_replacement
from pathlib import Path
from random import Random

import pytest
import torch
import transformers

from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.conversation.runner import open_runner
from kvlite.errors import SettingError
from kvlite.memory.device_budget import CONTEXT, MARGIN, bandwidth, capped_bytes, margin
from kvlite.memory.nvml import CardUse, spill_note
from kvlite.planner.candidates import open_planner
from kvlite.planner.cards import split
from kvlite.planner.max_context import reach, reaches
from kvlite.planner.plan import Plan
from kvlite.planner.planner import Planner
from tests.conftest import ARCHITECTURES, SIZES, Tiny
from tests.test_packed import random_ids

GIB = 1 << 30
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
ATTENTION = 2 * 4096 * 4096 + 2 * 4096 * 1024
MLP = 3 * 4096 * 14336
WEIGHTS = 2 * (2 * 128256 * 4096 + 32 * (ATTENTION + MLP) + 65 * 4096)
ENTRY = 2 * 128 * 2 + 4
"""Bytes of a KV head's key and value in bf16, and a position."""


@pytest.fixture
def llama_8b(tmp_path: Path) -> str:
    """A folder with the config of Llama-3.1-8B, and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def planner(model: str, vram: str = "24GiB", **settings: object) -> Planner:
    return open_planner(Settings(model=model, vram=vram).replace(settings))


def plan(model: str, tokens: int, **settings: object) -> Plan:
    made = planner(model, **settings)
    stream, weights = made.load_options[0]
    return made.plan(next(made._choices(weights, stream)), tokens)


def test_a_full_cache_of_8k_tokens_by_hand(llama_8b: str) -> None:
    made, n = plan(llama_8b, 8192, method="full", max_new_tokens=64), 8192
    assert made.weight_bytes == WEIGHTS == 16_060_522_496
    lines = 8 * ENTRY * (n + 64)
    reading = made.phases["read"]
    assert reading["one layer's KV"] == lines
    # All layers but the one that is read, which takes every row through its MLP.
    assert 30 * lines <= reading["KV cache"] <= 31 * lines
    tables = 8 * n + 4 * n + 2 * 2 * 128 * n
    assert n * 4096 * 2 + tables <= reading["hidden states"] <= n * 4096 * 2 + 2 * tables
    chunk = 1024
    assert 2 * 14336 * 2 * chunk < reading["activations and scores"] < 5 * 14336 * 2 * chunk
    answering = made.phases["answer"]
    assert answering["KV cache"] == 32 * lines
    assert made.fits
    assert made.room.tensors == 24 * GIB - CONTEXT - margin()


def test_a_quarter_of_128k_tokens_by_hand(llama_8b: str) -> None:
    n = 131072 - 256
    made = plan(llama_8b, n, budget="25%")
    kept = 8 * ENTRY * (n // 4 + 64)
    assert made.phases["read"]["one layer's KV"] == 8 * ENTRY * n
    index = 8 * ((n + 256) * (128 // 8 + 4) + 8 * 128)
    choosing = made.phases["choose"]
    assert choosing["KV cache"] == pytest.approx(31 * (kept + index), rel=0.01)
    host = 32 * 8 * ENTRY * (n + 256)
    assert made.forecast.host_bytes == pytest.approx(host, rel=0.01)
    by_hand = WEIGHTS + 31 * (kept + index) + 8 * ENTRY * n + n * 4096 * 2
    assert by_hand < made.peak_bytes < by_hand + 1.2 * GIB
    assert made.fits


def test_weights_of_4_bits_by_hand(llama_8b: str) -> None:
    made = plan(llama_8b, 8192, weights="nf4", kv_bits="4", method="full")
    numbers = 32 * (ATTENTION + MLP)
    # 4 bits, and 8 of a scale for every 64 with one more of 32 for every 256 of these.
    packed = numbers // 2 + numbers // 64 + 4 * numbers // 64 // 256
    assert made.weight_bytes == pytest.approx(
        2 * (2 * 128256 * 4096 + 65 * 4096) + packed, rel=1e-3
    )
    assert made.phases["load"]["a weight on its way"] == 2 * 128256 * 4096
    # Two groups of 64 channels a side, each with a scale and an offset; the ends are exact.
    entry = 128 + 2 * 2 * 2 * 2 + 4
    lines = (8192 + 256) * entry + 36 * ENTRY
    assert made.phases["answer"]["KV cache"] == pytest.approx(32 * 8 * lines, rel=0.02)


def test_what_fits_grows_with_what_is_given_up(llama_8b: str) -> None:
    rows = {(row.weights, row.method, row.kv_bits): row for row in reaches(planner(llama_8b))}
    assert len(rows) == 18
    for weights in ("bf16", "int8", "nf4"):
        for method in ("full", "the default"):
            tokens = [rows[weights, method, bits].tokens for bits in ("16", "8", "4")]
            assert tokens == sorted(tokens)
            assert tokens[0] > 0
    full = [rows[weights, "full", "16"].tokens for weights in ("bf16", "int8", "nf4")]
    assert full == sorted(full)
    exact = planner(llama_8b, method="full")
    choice = next(exact._choices(exact.load_options[0][1], "off"))
    assert exact.plan(choice, full[0] - 64).fits
    assert not exact.plan(choice, full[0] + 600).fits
    assert rows["bf16", "the default", "16"].all_of_it


@pytest.mark.long
def test_what_is_given_up_comes_in_order_and_is_said(llama_8b: str) -> None:
    ample = planner(llama_8b, method="full").best(8192)
    assert len(ample.reasons) == 1
    assert not ample.changes
    tight = planner(llama_8b, method="full").best(80_000)
    assert tight.fits
    assert (tight.choice.weights.name, tight.choice.kv_bits) == ("bf16", "8")
    assert any("8 bits" in reason for reason in tight.changes)
    small = planner(llama_8b, vram="12GiB").best(8192)
    assert (small.choice.weights.name, small.choice.stream, small.fits) == ("nf4", "off", True)
    smallest = planner(llama_8b, vram="5GiB").best(8192)
    assert (smallest.choice.stream, smallest.fits) == ("ram", True)
    assert not planner(llama_8b, vram="3GiB").best(8192).fits


def test_a_text_that_fits_may_be_any_shorter_one(tmp_path: Path) -> None:
    """Of Llama 4, whose layers hold the last chunk alone, and less once that is full."""
    _, own = ARCHITECTURES["llama4"]
    sizes = {**SIZES, **own, "attention_chunk_size": 512, "max_position_embeddings": 4096}
    transformers.Llama4TextConfig(**sizes).save_pretrained(tmp_path)
    made = planner(str(tmp_path), method="full", kv_bits="16", weights="bf16")
    choice = replace(next(made._choices(made.load_options[0][1], "off")), chunk=256)
    for offered in (2559, 3500):
        phases = made.plan(choice, offered).phases.values()
        total = max(sum(items.values()) for items in phases)
        made.room = replace(made.room, total=total, context=0, margin=0)
        most = reach(made, choice)
        assert offered - 512 < most <= offered
        for length in (most, most - most % 512 - 1):
            assert made.plan(choice, length).fits


def test_layers_are_split_as_trying_every_split_does() -> None:
    random = Random(1)
    for _ in range(40):
        sizes = [random.randint(1, 9) for _ in range(random.randint(3, 7))]
        first, work = random.randint(0, 9), random.randint(0, 5)
        offered = [random.randint(5, 30) for _ in range(3)]
        counts = split(sizes, first, work, offered)
        assert sum(counts) == len(sizes)
        every = combinations_with_replacement(range(len(sizes) + 1), 2)
        levels = [
            max(
                (sum(sizes[:one]) + first + work) / offered[0],
                (sum(sizes[one:two]) + work) / offered[1],
                (sum(sizes[two:]) + work) / offered[2],
            )
            for one, two in [(counts[0], counts[0] + counts[1]), *every]
        ]
        assert levels[0] == min(levels)


def test_a_model_too_large_for_one_card_is_planned_over_two(llama_8b: str) -> None:
    given = {"vram": "12GiB", "weights": "bf16", "method": "full", "kv_bits": "16", "chunk": 256}
    assert WEIGHTS > 12 * GIB
    asked = planner(llama_8b, device="cuda:0,cuda:1", **given)
    made = asked.best(16384)
    assert made.fits and sum(each.layers for each in made.cards) == 32
    beside = 2 * 2 * 128256 * 4096
    for each, first in zip(made.cards, (beside, 0), strict=True):
        layers = each.layers * 2 * (ATTENTION + MLP + 2 * 4096)
        assert each.weights == pytest.approx(first + layers, abs=1 << 14)
        assert each.kv == pytest.approx(each.layers * 8 * ENTRY * (16384 + 256), rel=0.01)
        assert each.free > 0
    one, other = (each.peak / each.offered for each in made.cards)
    assert abs(one - other) < 1.5 / 32  # of a layer
    choice, most = made.choice, reach(asked, made.choice)
    assert asked.plan(choice, most).fits and not asked.plan(choice, most + most // 50).fits


def test_nothing_lossy_is_chosen_where_that_is_forbidden(llama_8b: str) -> None:
    made = planner(llama_8b, vram="20GiB", never_lossy=True, method="full").best(120_000)
    assert (made.choice.budget, made.choice.kv_bits) == ("auto", "16")


@pytest.mark.parametrize(
    ("tokens", "bits", "kept"),
    [(8192, "16", 8192), (32768, "16", 32768), (65536, "8", 65536), (130_000, "16", 0)],
)
def test_auto_keeps_everything_while_it_fits_then_what_does(
    llama_8b: str, tokens: int, bits: str, kept: int
) -> None:
    asked = planner(llama_8b, weights="bf16", stream="off")
    made = asked.best(tokens)
    assert made.fits and made.choice.kv_bits == bits
    decided = made.choice.decided(asked.config).settings
    assert decided.budget == decided.kv_bits == "auto"
    assert made.to_json()["kept_tokens"] == made.kept
    if kept:
        assert made.kept == kept
        return
    assert tokens // 16 < made.kept < tokens
    assert f"keeps {made.kept:,} of {tokens:,} entries" in made.reasons[-1]
    more = asked.config.changed(asked.settings.replace({"budget": str(made.kept + 2048)}))
    given = replace(made.choice.given, budget=more.budget)
    assert not asked.plan(replace(made.choice, given=given), tokens).fits


def test_the_longest_text_drops_nothing_where_that_is_forbidden(llama_8b: str) -> None:
    asked = planner(llama_8b, weights="bf16", stream="off", never_lossy=True)
    assert asked.plan(asked.usual(), reach(asked, asked.usual())).fits


def test_a_method_that_needs_more_than_the_least_budget_is_planned(llama_8b: str) -> None:
    made = planner(llama_8b, vram="2GiB", method="snapkv:window=1100").best(8192)
    assert not made.fits
    assert made.kept > 1100


def test_an_answer_is_no_longer_than_the_model_goes(llama_8b: str) -> None:
    made = planner(llama_8b, reserve_tokens=10**6).best(8192)
    assert made.longest == 131072 - 8192
    assert made.fits


def test_a_checkpoint_that_is_quantized_is_planned_as_it_is(llama_8b: str) -> None:
    path = Path(llama_8b) / "config.json"
    config = {**LLAMA_8B, "quantization_config": {"quant_method": "awq", "bits": 4}}
    path.write_text(json.dumps(config))
    made = planner(llama_8b, vram="12GiB").best(8192)
    assert (made.choice.weights.name, made.fits) == ("awq", True)
    assert 5 * GIB < made.weight_bytes < 7 * GIB


def test_what_was_loaded_may_be_called_auto() -> None:
    settings = Settings(weights="bf16", stream="off", vram="2GiB")
    same = settings.after_load({"weights": "auto", "stream": "auto", "vram": "auto", "seed": 5})
    assert same == settings.replace({"seed": 5})
    with pytest.raises(SettingError, match="stream 'disk'"):
        settings.after_load({"stream": "disk"})


def test_what_the_user_chose_stays(llama_8b: str) -> None:
    chosen = planner(llama_8b, vram="12GiB", weights="bf16", stream="off").best(8192)
    assert not chosen.fits
    assert (chosen.choice.weights.name, chosen.choice.stream) == ("bf16", "off")
    fixed = planner(llama_8b, method="full", kv_bits="16", chunk=777).best(80_000).choice
    assert (fixed.kv_bits, fixed.chunk) == ("16", 777)


def test_speed_is_bounded_by_what_is_read_for_a_token(llama_8b: str) -> None:
    made = open_planner(Settings(model=llama_8b, vram="24GiB"), card="NVIDIA GeForce RTX 4090")
    best = made.best(8192)
    read = WEIGHTS - 2 * 128256 * 4096 + best.forecast.answering.kv
    assert best.tokens_per_s == pytest.approx(1008e9 / read)
    assert bandwidth("something else") is None
    assert bandwidth("NVIDIA L40") is None
    assert bandwidth("NVIDIA GeForce RTX 3060 Ti") == 448e9
    assert bandwidth("NVIDIA A100 80GB PCIe") == 1935e9


@pytest.fixture(scope="module")
def wide_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose chunks take more than its weights."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    shutil.copytree(tiny_folder, folder)
    sizes = {**SIZES, "vocab_size": 49_152, "hidden_size": 16, "intermediate_size": 8192}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.cases(1)
@pytest.mark.parametrize("share", [0.5, 0.25, 0.0])
def test_a_model_answers_within_a_cap(wide_folder: Path, share: float) -> None:
    """Every cap down to the least that a plan calls possible is kept to."""
    settings = Settings(
        model=str(wide_folder), method="snapkv:window=8", max_new_tokens=8, device="cpu"
    )
    usual = open_planner(settings.replace({"vram": "8GiB"})).best(900)
    least = open_planner(settings.replace({"vram": "1MiB"})).best(900)
    assert least.peak_bytes < 0.5 * usual.peak_bytes
    peak = least.peak_bytes + share * (usual.peak_bytes - least.peak_bytes)
    cap = int(peak / 0.98) + 1
    within = settings.replace({"vram": f"{cap}B"})
    runner = open_runner(within, None, lambda tokenizer, max_context: 900)
    assert runner.plan is not None
    answer = runner.generate(random_ids(900)[0].tolist(), ignore_eos=True)
    metrics = answer.metrics
    assert metrics.generated_tokens == 8
    assert metrics.peak_bytes <= cap
    assert metrics.planned_peak_bytes == pytest.approx(metrics.peak_bytes, rel=0.02)
    assert metrics.plan_error == pytest.approx(metrics.planned_peak_bytes / metrics.peak_bytes - 1)


def test_each_phase_is_measured_beside_its_plan(llama: Tiny) -> None:
    talk = Conversation(
        llama.model, Settings(method="snapkv:window=8", budget="64", measure="tensors")
    )
    for new in (300, 40):
        ids = random_ids(new)[0].tolist()
        metrics = talk.generate(ids, max_new_tokens=12, ignore_eos=True).metrics
        assert set(metrics.phase_peak_bytes) == {"read", "answer"}
        assert metrics.peak_bytes == max(metrics.phase_peak_bytes.values())
        assert metrics.planned_peak_bytes == max(metrics.planned_phase_bytes.values())
        for phase, peak in metrics.phase_peak_bytes.items():
            assert metrics.planned_phase_bytes[phase] == pytest.approx(peak, rel=0.03)


def test_a_turn_without_a_plan_goes_on(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("asks for numbers")

    monkeypatch.setattr(llama.model, "meta", None)
    monkeypatch.setattr(llama.model, "forecasts", {})  # which may have the answer
    monkeypatch.setattr("kvlite.planner.forecast._forecast", fails)
    talk = Conversation(llama.model, Settings(measure="tensors"))
    metrics = talk.generate([5, 6, 7], max_new_tokens=2, ignore_eos=True).metrics
    assert (metrics.planned_peak_bytes, metrics.plan_error) == (None, None)
    assert metrics.generated_tokens == 2
    assert "planned" not in metrics.line()


def test_sizes_that_are_none_are_refused() -> None:
    assert capped_bytes("auto") is None
    assert capped_bytes("24GiB") == 24 * GIB
    for text in ("24", "much", "0GiB"):
        with pytest.raises(SettingError, match="--vram"):
            capped_bytes(text)


def test_tensors_that_a_driver_moved_away_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    use = CardUse(total=24 * GIB, used=20 * GIB, held=23 * GIB)
    assert (use.spilled, use.others, use.free) == (3 * GIB, 0, 4 * GIB)
    full, unknown = replace(use, held=18 * GIB), None
    monkeypatch.setattr("kvlite.memory.nvml.card_use", lambda each: each)
    monkeypatch.setattr("kvlite.memory.nvml.spills", lambda: True)
    for cards, said in ([use], "3.00 GiB"), ([full, use, unknown, use], "6.00 GiB"):
        assert said in spill_note(cards)  # type: ignore[arg-type]
    assert spill_note([full, unknown]) == ""  # type: ignore[list-item]
    monkeypatch.setattr("kvlite.memory.nvml.spills", lambda: False)
    assert spill_note([use]) == ""  # type: ignore[list-item]
    assert margin() == MARGIN
