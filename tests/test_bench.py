"""The bench: reading once for many methods is the same as reading for each, and it reports."""

import json
import sys
from typing import Any

import pytest
import torch

import kvlite
from kvlite.bench.fork import read_once
from kvlite.bench.niah import Row, _leading, make_needle, niah, prompt_ids, tallies
from kvlite.bench.speed import peak_over_weights
from kvlite.cache import KVCache
from kvlite.cli.main import main
from kvlite.engine.prefill import prefill
from kvlite.methods import parse_method
from kvlite.methods.rules import layer_rules

from .conftest import Tiny

CHOICES = [
    ("full", 300),
    ("streaming", 40),
    ("random", 40),
    ("snapkv", 40),
    ("snapkv", 500),
    ("pyramidkv", 40),
    ("kvx:beta=4", 40),
    ("kvx:middle=example,omega=8", 40),
    ("kvx:alpha=16,queries=max,heads=max,pool=31", 80),
    ("h2o", 40),
    ("tova:per_head=true", 40),
    ("keydiff", 40),
    ("snapkv:layers=global", 60),
    ("simlayerkv:threshold=0.5,recent=30+kvx:layers=entropy", 60),
]


def test_reading_once_gives_every_method_the_cache_it_would_have_alone(tiny: Tiny) -> None:
    model = tiny.model
    ids = torch.randint(3, 199, (1, 300), generator=torch.Generator().manual_seed(5))
    choices = [(parse_method(spec), budget) for spec, budget in CHOICES]
    logits, branches = read_once(model, ids[0].tolist(), choices, reserve=8)
    shape = model.shape
    for (method, budget), (forked, _) in zip(choices, branches, strict=True):
        alone = KVCache.empty(
            shape.layers, shape.kv_heads, shape.head_dim, dtype=model.dtype, device=model.device
        )
        rules = layer_rules(method, shape, budget, 300)
        expected = prefill(model, alone, ids, rules, reserve=8)
        torch.testing.assert_close(logits, expected)
        for ours, theirs in zip(forked.layers, alone.layers, strict=True):
            for bank, other in zip(ours.banks, theirs.banks, strict=True):
                assert bank.used == other.used
                held = slice(0, bank.used)
                assert bank.positions[:, :, held].equal(other.positions[:, :, held])
                torch.testing.assert_close(bank.keys[:, :, held], other.keys[:, :, held])
                torch.testing.assert_close(bank.values[:, :, held], other.values[:, :, held])
                assert (bank.rows is None) == (other.rows is None)
                if bank.rows is not None and other.rows is not None:
                    torch.testing.assert_close(bank.rows[..., held], other.rows[..., held])


@pytest.mark.parametrize(
    ("said", "share"),
    [("1234567", 1), ("1234500", 5 / 7), ("It is 1,234,567.", 1), ("none", 0), ("9 or 12", 2 / 7)],
)
def test_leading_digits(said: str, share: float) -> None:
    assert _leading("number", "1234567", said) == pytest.approx(share)


def test_leading_words() -> None:
    assert _leading("sentence", "eat a sandwich", "Eat the SANDWICH") == pytest.approx(2 / 3)


def test_tallies_add_up_over_depths() -> None:
    def row(depth: float, hit: bool, budget: int = 64) -> Row:
        return Row(
            "number", 500, depth, 498, "snapkv", budget, 64.0, 1000, hit, hit / 1, 2.0 * hit, ""
        )

    first, second = tallies([row(0, True), row(0, True, 128), row(1, False)])
    assert (first.budget, first.hits, first.asked, first.leading) == (64, 1, 2, 0.5)
    assert first.surprise == 1
    assert (second.budget, second.hits, second.asked) == (128, 1, 1)


def test_the_peak_over_weights_is_counted_exactly() -> None:
    model = torch.nn.Linear(10, 10)

    def run() -> None:
        first = torch.ones(1000)
        del first
        torch.ones(500)

    model.device = torch.device("cpu")  # type: ignore[assignment]
    assert peak_over_weights(model, run) == 4000


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["kvlite", "bench", *words.split(), "--json"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["machine"]["torch"] == torch.__version__
    return report


def test_bench_niah(
    smollm: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "niah --tokens 300 --depths 2 --kind number --budget 64 --budget 99"
    report = run(monkeypatch, capsys, f"{words} --method full --method snapkv")
    cells = [(row["method"], row["budget"], row["depth"]) for row in report["rows"]]
    methods = [("full", 300), ("snapkv", 64), ("snapkv", 99)]
    assert cells == [(*method, depth) for depth in (0, 1) for method in methods]
    assert [row["hit"] for row in report["rows"] if row["method"] == "full"] == [True, True]
    assert {row["entries_mean"] for row in report["rows"] if row["budget"] == 64} == {64}


def test_surprise_is_what_transformers_finds(
    smollm: kvlite.Runner, smollm_reference: Any, prose: list[int]
) -> None:
    needle = make_needle("number", 0)
    text = smollm.tokenizer.decode(prose)
    choices = [(parse_method("full"), 300), (parse_method("snapkv"), 40)]
    given = {"lengths": [300], "depths": [0.5], "kinds": ["number"], "prose": text}
    whole, cut = niah(smollm, choices, **given)  # type: ignore[arg-type]
    assert whole.surprise < cut.surprise
    ids = prompt_ids(smollm, text, needle, 300, 0.5)
    forced = smollm.tokenizer.encode(needle.text, add_special_tokens=False)
    with torch.no_grad():
        logits = smollm_reference(torch.tensor([ids + forced])).logits[0, len(ids) - 1 : -1]
    nats = -logits.log_softmax(-1)[range(len(forced)), forced]
    digits = [smollm.tokenizer.decode([token]).strip().isdigit() for token in forced]
    assert whole.surprise == pytest.approx(float(nats[torch.tensor(digits)].mean()), abs=1e-4)


def test_bench_speed(
    smollm: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "speed --tokens 300 --repeats 1 --new-tokens 3 --method snapkv --budget 64"
    (row,) = run(monkeypatch, capsys, words)["rows"]
    assert (row["tokens"], row["method"], row["budget"]) == (300, "snapkv", "64")
    assert row["prefill_s"] > 0 < row["decode_s"]
    assert row["kv_bytes"] < row["full_kv_bytes"] / 2
    assert 0 < row["peak_bytes"] < row["reference_peak_bytes"]
