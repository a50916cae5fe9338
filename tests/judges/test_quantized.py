"""Quantized files: tiny ones in several types, and a real one that KVLITE_HALF_MODEL names.

llama.cpp rounds activations to 8 bits where weights are quantized, so it judges twice: exactly,
what a file holds written in F32, and coarsely, the file itself.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvlite
from kvlite.bench.prose import bundled_prose
from kvlite.model import packed_linear
from tests.judges.cases import ALL
from tests.judges.kvlite_side import answer, ask_kvlite, difference
from tests.judges.make import Judged, Reply, ask_llama_cpp, furthest, question
from tests.judges.quantized import dequantize

TYPES = [("llama", kind) for kind in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")]
TYPES += [(name, "q8_0") for name in ("phi3", "qwen3_5", "qwen3_5_moe-fused", "deepseek_v2")]
TYPES += [("qwen3_moe", "q8_0"), ("nemotron_h-moe", "q8_0"), ("gpt_oss", "mxfp4")]
PACKED, COARSE = 1e-4, 1.0
REAL = os.environ.get("KVLITE_HALF_MODEL", "")


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without products in bfloat16, which some processors have, and which differ by more."""
    monkeypatch.setattr(packed_linear, "has_bfloat16", lambda: False)


def _params() -> Iterator[object]:
    for at, (name, kind) in enumerate(TYPES):
        marks = [pytest.mark.long, *([pytest.mark.exhaustive] if at else [])]
        judged = Judged(ALL[name], kind)
        yield pytest.param(judged, id=judged.name, marks=marks)


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("judged", _params())
def test_quantized_weights_are_what_they_are_to_llama_cpp(judged: Judged) -> None:
    twin = Judged(judged.case, judged.type, twin=True).llama_cpp
    assert twin is not None
    ids = judged.expected.ids
    dequantized = ask_kvlite(judged.file, ids, "fp32")
    if judged.case.llama_cpp == "agrees":
        assert furthest(dequantized.log_probabilities, twin) < judged.case.tolerance
        assert dequantized.tokens == twin.tokens
        assert judged.llama_cpp is not None
        # Activations of 8 bits choose other experts.
        if "num_experts_per_tok" not in judged.case.sizes:
            assert furthest(dequantized.log_probabilities, judged.llama_cpp) < COARSE
    packed = ask_kvlite(judged.file, ids, "gguf")
    assert difference(packed, dequantized) < PACKED


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.skipif(not REAL, reason="KVLITE_HALF_MODEL names no GGUF file of Qwen2.5 0.5B")
def test_a_real_file_is_what_it_is_to_llama_cpp(tmp_path: Path) -> None:
    runner = kvlite.load(REAL, device="cpu", weights="fp32", recall="off")
    ids = runner.tokenizer.encode(bundled_prose())[:128]
    dequantized = answer(runner, ids)
    del runner
    twin, vocabulary = tmp_path / "twin.gguf", len(dequantized.log_probabilities)
    dequantize(Path(REAL), twin)
    files = {"file": Path(REAL), "twin": twin}
    replies = {name: tmp_path / f"{name}.json" for name in files}
    ask_llama_cpp([question(files[name], ids, vocabulary, replies[name]) for name in files])
    exact, coarse = (Reply.load(replies[name]) for name in ("twin", "file"))
    assert dequantized.tokens == exact.tokens
    assert furthest(dequantized.log_probabilities, exact) < 2e-3
    assert furthest(dequantized.log_probabilities, coarse) < COARSE
    packed = ask_kvlite(Path(REAL), ids, "gguf")
    assert difference(packed, dequantized) < PACKED
