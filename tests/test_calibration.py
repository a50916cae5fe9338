"""What is measured of a model: beside the oracle, found by its weights, refused if damaged."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

import kvlite
from kvlite.bench.calibrate import CUE, RECALLED, _recall, calibrate, pieces_of
from kvlite.errors import ModelError, SettingError
from kvlite.methods.simlayerkv import SimLayerKV
from kvlite.model.calibration import calibration_path, find_calibration
from kvlite.model.files import fingerprint
from tests.conftest import Tiny, made_up_calibration, make_tiny
from tests.oracles import rank as oracle
from tests.test_simlayerkv import planted


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLITE_DATA", str(tmp_path / "data"))


def rotated_queries(reference: Any, ids: Tensor) -> list[Tensor]:
    """Of each layer, `(heads, n, dim)`, as transformers hands them to attention."""
    caught: list[Tensor] = []

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        caught.append(q[0])
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("catching-oracle", attention)
    model = AutoModelForCausalLM.from_config(
        deepcopy(reference.config), attn_implementation="catching-oracle"
    )
    model.load_state_dict(reference.state_dict())
    with torch.no_grad():
        model.eval()(ids, use_cache=False)
    return caught


def test_ranks_equal_the_oracle(llama: Tiny) -> None:
    torch.manual_seed(0)
    pieces = [torch.randint(3, 199, (64,)).tolist() for _ in range(3)]
    found = calibrate(llama.model, "tiny", "numbers", pieces)
    assert (found.samples, found.tokens, found.max_context) == (3, 64, 1024)
    assert found.lazy_threshold is None  # too short to tell
    queries = [rotated_queries(llama.reference, torch.tensor([piece])) for piece in pieces]
    for layer in range(4):
        whole = [
            oracle.truncated_rank(each[layer][head].numpy(), 16)
            for each in queries
            for head in range(4)
        ]
        assert found.layer_ranks[layer] == pytest.approx(sum(whole) / 12, abs=1e-3)
        ranks = [
            [oracle.truncated_rank(each[layer][head].numpy(), found.elbow) for head in range(4)]
            for each in queries
        ]
        kv = [[(one[0] + one[1]) / 2, (one[2] + one[3]) / 2] for one in ranks]
        for head in range(2):
            mean = sum(one[head] for one in kv) / 3
            assert found.head_ranks[layer][head] == pytest.approx(mean, abs=1e-3)
        assert found.head_wins[layer] == (
            sum(one[0] > one[1] for one in kv),
            sum(one[0] < one[1] for one in kv),
        )


def test_the_threshold_is_the_lowest_that_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = SimLayerKV(recent=20, last=8)
    torch.manual_seed(1)
    pieces = [[3, *torch.randint(4, 199, (199,)).tolist()] for _ in range(2)]
    # Layers 0 and 1 look at the ends alone; what the others lose is set by hand.
    tiny = planted({0, 1})
    oom_policy: list[float] = []

    def recall(model: object, piece: object, methods: list[SimLayerKV]) -> list[float]:
        oom_policy[:] = [float(method.threshold) for method in methods]
        return [2.0 if method.threshold < 0.5 else 1.05 for method in methods[:-1]] + [1.0]

    monkeypatch.setattr("kvlite.bench.calibrate._recall", recall)
    found = calibrate(tiny.model, "tiny", "numbers", pieces, lazy=lazy)
    assert min(found.lazy_shares[:2]) > 0.95 and max(found.lazy_shares[2:]) < 0.5
    assert oom_policy == sorted(oom_policy) and oom_policy[0] == 0 and oom_policy[-1] == 1
    assert found.lazy_threshold == next(each for each in oom_policy if each >= 0.5)


def test_recall_is_what_a_passage_costs_when_it_is_said_again(llama: Tiny) -> None:
    torch.manual_seed(2)
    piece = torch.randint(3, 199, (200,)).tolist()
    methods = [SimLayerKV(threshold=each, recent=20, last=8) for each in (0, 1)]
    trimmed, whole = _recall(llama.model, piece, methods)
    prompt = [*piece, *piece[50 : 50 + CUE + RECALLED]]
    with torch.no_grad():
        rows = llama.reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    said = range(200 + CUE, 200 + CUE + RECALLED)
    expected = -sum(float(rows[at - 1, prompt[at]]) for at in said) / RECALLED
    assert whole == pytest.approx(expected, abs=1e-4)
    assert trimmed != pytest.approx(whole, abs=1e-3)


def test_a_calibration_is_found_by_the_weights_and_not_by_the_name(
    tiny_folder: Path, tmp_path: Path
) -> None:
    mark = fingerprint(tiny_folder)
    assert find_calibration(tiny_folder) is None
    known = replace(made_up_calibration(make_tiny("llama").model.shape), fingerprint=mark)
    known.save(calibration_path(mark))
    assert find_calibration(tiny_folder) == known
    assert kvlite.load(str(tiny_folder)).model.calibration == known
    weights = load_file(tiny_folder / "model.safetensors")
    copy = tmp_path / "copy"
    copy.mkdir()
    save_file(weights, copy / "model.safetensors", metadata={"made": "elsewhere"})
    assert find_calibration(copy) == known
    name = sorted(weights)[0]
    weights[name] = weights[name] + 0.5
    save_file(weights, copy / "model.safetensors")
    assert find_calibration(copy) is None


@pytest.mark.parametrize("data", [b"", b"\0" * 50, b"\xff" * 50, b"\2\0\0\0\0\0\0\0[]"])
def test_damaged_weights_are_refused_in_a_sentence(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match=r"model.safetensors is damaged"):
        fingerprint(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1}', '{"format": 99}', "\x00\x01", '"kvlite"']
)
def test_a_damaged_calibration_is_refused_in_a_sentence(tiny_folder: Path, text: str) -> None:
    path = calibration_path(fingerprint(tiny_folder))
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ModelError, match="kvlite calibrate"):
        find_calibration(tiny_folder)


@pytest.mark.parametrize(
    "change",
    [
        {"head_ranks": ((5.0, 4.0),)},
        {"layer_ranks": ("a", "b", "c", "d")},
        {"layer_ranks": (float("nan"),) * 4},
        {"head_wins": ((1,), (1, 0), (1, 0), (1, 0))},
        {"fingerprint": "another"},
    ],
)
def test_numbers_that_do_not_fit_are_refused(tiny_folder: Path, change: dict[str, Any]) -> None:
    mark = fingerprint(tiny_folder)
    known = replace(made_up_calibration(make_tiny("llama").model.shape), fingerprint=mark)
    replace(known, **change).save(calibration_path(mark))
    with pytest.raises(ModelError, match="kvlite calibrate"):
        find_calibration(tiny_folder)


def test_texts_that_are_too_short_and_pieces_that_are_too_long(llama: Tiny) -> None:
    text = " ".join(str(3 + i % 190) for i in range(100))
    assert [len(piece) for piece in pieces_of(llama.model, text, 3, 40)] == [40] * 3
    assert [piece[0] for piece in pieces_of(llama.model, text, 3, 40)] == [3, 33, 63]
    with pytest.raises(SettingError, match="100 tokens, fewer than --tokens 101"):
        pieces_of(llama.model, text, 3, 101)
    with pytest.raises(SettingError, match="too long for this model"):
        pieces_of(llama.model, text, 3, 1024)
