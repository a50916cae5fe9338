"""GGUF files, read where they lie: what is in them, and a sentence for what cannot be read."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

import kvlite
from kvlite.errors import ModelError, SettingError
from kvlite.model.embedded import embedded_ggufs
from kvlite.model.gguf.config import config_of
from kvlite.model.gguf.folder import gguf_folder
from kvlite.model.gguf.header import read_header
from kvlite.model.gguf.undo import ORDERS
from kvlite.model.local_models import leftovers, remove_leftovers
from kvlite.model.source import find_model
from kvlite.model.weights import held_tensors
from tests.gguf_files import write_gguf

SIZES = {"q": 32, "k": 16, "v": 16}
EXPERTS = {"expert_count": 3, "expert_used_count": 2, "feed_forward_length": 64}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("KVLITE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def held(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("gguf/*"))


def loaded(file: Path) -> Any:
    return kvlite.load(str(file), device="cpu", weights="fp32").model


def test_its_weights_are_read_where_they_lie(tmp_path: Path, cache: Path) -> None:
    weights = write_gguf(tmp_path / "a.gguf")
    said: list[str] = []
    folder = find_model(str(tmp_path / "a.gguf"), said.append)
    assert held(cache) == [folder.name] and said == []
    model = loaded(tmp_path / "a.gguf")
    assert model.path == folder and model.stop_ids == {0}
    assert model.tokenizer.encode("abcd") == [6, 7]
    ours = model.module.state_dict()
    assert np.array_equal(ours["model.embed_tokens.weight"], weights["token_embd.weight"])
    up = ours["model.layers.0.mlp.up_proj.weight"]
    assert np.array_equal(up, weights["blk.0.ffn_up.weight"])
    written = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    assert written < 20_000 and not [*cache.rglob("*.safetensors")]


def test_a_folder_is_named_by_what_is_in_the_file(tmp_path: Path, cache: Path) -> None:
    first, elsewhere, renamed = (tmp_path / name for name in ("a.gguf", "b/a.gguf", "c.gguf"))
    elsewhere.parent.mkdir()
    write_gguf(first)
    folder = gguf_folder(first)
    for copy in (elsewhere, renamed):
        shutil.copy(first, copy)
    assert gguf_folder(elsewhere) == folder
    assert gguf_folder(renamed).name == folder.name.replace("a-", "c-")
    first.unlink()  # the folder now belongs to the copy
    assert loaded(elsewhere).path == folder
    write_gguf(elsewhere, seed=1)
    assert gguf_folder(elsewhere) != folder
    assert len(held(cache)) == 3


def test_a_model_in_several_files_is_one(tmp_path: Path, cache: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf")
    write_gguf(tmp_path / "a.gguf", split=4)
    parts = sorted(tmp_path.glob("a-0000*-of-00003.gguf"))
    assert len(parts) == 3
    header = read_header(parts[0])
    assert header.paths == tuple(parts) and {*header.tensors} == {*whole}
    assert read_header(parts[2]).paths == tuple(parts)
    ours = loaded(parts[1]).module.state_dict()
    up = ours["model.layers.0.mlp.up_proj.weight"]
    assert np.array_equal(up, whole["blk.0.ffn_up.weight"])
    parts[1].rename(tmp_path / "away.gguf")
    with pytest.raises(ModelError, match=r"a-00002-of-00003\.gguf is missing, one of 3 parts"):
        gguf_folder(parts[0])
    (tmp_path / "away.gguf").rename(parts[1])
    parts[0].rename(tmp_path / "first.gguf")
    with pytest.raises(ModelError, match=r"a-00001-of-00003\.gguf is missing, the first part"):
        gguf_folder(parts[1])
    with pytest.raises(ModelError, match=r"which llama\.cpp finds by their names"):
        gguf_folder(tmp_path / "first.gguf")


def test_a_truncated_file_is_refused_and_nothing_is_written(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "half.gguf"
    with embedded_ggufs()[0].open("rb") as whole:
        start = whole.read(4 << 20)
    write_gguf(tmp_path / "tiny.gguf")
    tiny = (tmp_path / "tiny.gguf").read_bytes()
    for content in (start, b"", start[:3], *(tiny[:n] for n in (4, 8, 20, 24, 100, 1000, -1))):
        file.write_bytes(content)
        with pytest.raises(ModelError, match=r"half\.gguf is (truncated|not a GGUF)"):
            gguf_folder(file)
    assert held(cache) == []


BIG = gguf.GGUFEndian.BIG
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "gpt2"}, "'gpt2' model, which kvlite does not run from"),
    "projector": ({"fields": {"general.type": "mmproj"}}, r"an image encoder \(mmproj\)"),
    "adapter": ({"fields": {"general.type": "adapter"}}, "a LoRA adapter"),
    "order": ({"order": BIG}, "is big-endian"),
    "tokenizer": ({"without": ("tokenizer",)}, r"tokenizer\.ggml\.model is missing"),
    "tensor": ({"without": ("blk.0.ffn_up",)}, r"has no 'blk\.0\.ffn_up\.weight', which a 'llama'"),
    "key": ({"without": ("context_length",)}, r"llama\.context_length is missing"),
    "unknown key": (
        {"fields": {"llama.attention.sparkle": 0.5}},
        r"says llama\.attention\.sparkle = 0\.5 of its model, which kvlite does not understand",
    ),
    "unknown tensor": (
        {"tensors": {"blk.0.attn_sparkle.weight": np.ones(32)}},
        r"has a tensor 'blk\.0\.attn_sparkle\.weight', which kvlite does not know of a 'llama'",
    ),
    "another size": (
        {"without": ("blk.0.ffn_up",), "tensors": {"blk.0.ffn_up.weight": np.ones((47, 32))}},
        r"do not fit what it says of the model: model\.layers\.0\.mlp\.up_proj\.weight has sizes",
    ),
    "rope type": ({"fields": {"llama.rope.scaling.type": "twist"}}, "is 'twist', and it must be"),
    "a layer too many": (
        {"tensors": {"blk.1.attn_q.weight": np.ones((32, 32))}},
        "has a tensor 'blk",
    ),
    "an infinite number": (
        {"fields": {"llama.rope.freq_base": float("inf")}, "without": ("rope.freq_base",)},
        "a number is needed",
    ),
    "no base": (
        {"fields": {"llama.rope.freq_base": -1.0}, "without": ("rope.freq_base",)},
        "it must be above 0",
    ),
    "half a head": ({"fields": {"llama.rope.dimension_count": 8}}, "is 8, and a head has 16"),
    "no head": ({"fields": {"llama.attention.key_length": 0}}, "it must be 1 or more"),
    "two scalings": (
        {
            "fields": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            "tensors": {"rope_freqs.weight": np.full(8, 2.0)},
        },
        "scaled in two ways",
    ),
    "a half of longrope": (
        {"tensors": {"rope_factors_long.weight": np.full(8, 2.0)}},
        "belong together",
    ),
    "no epsilon": (
        {"without": ("attention.layer_norm_rms_epsilon",)},
        r"layer_norm_rms_epsilon is missing, and norms need it",
    ),
    "an embedding model": (
        {"fields": {"llama.attention.causal": False}},
        "an embedding model, which answers nothing",
    ),
    "more tokens than embeddings": (
        {"without": ("token_embd",), "tensors": {"token_embd.weight": np.ones((7, 32))}},
        "has 8 tokens, and embeddings of 7",
    ),
    "no context": (
        {"fields": {"llama.context_length": 0}, "without": ("context_length",)},
        r"llama\.context_length is 0, and it must be 1 or more",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    given, why = REFUSED[name]
    write_gguf(tmp_path / "a.gguf", **given)
    with pytest.raises(ModelError, match=why) as error:
        gguf_folder(tmp_path / "a.gguf")
    assert str(tmp_path / "a.gguf") in str(error.value) and "\n" not in str(error.value)


def test_a_folder_that_was_left_half_written_is_finished(tmp_path: Path) -> None:
    fields = {"tokenizer.chat_template": "{{ 1 }}", "tokenizer.chat_template.rag": "{{ 2 }}"}
    write_gguf(tmp_path / "a.gguf", fields=fields)
    folder = gguf_folder(tmp_path / "a.gguf")
    (folder / "tokenizer_config.json").unlink()
    assert gguf_folder(tmp_path / "a.gguf") == folder
    assert (folder / "tokenizer_config.json").is_file()
    assert (folder / "additional_chat_templates" / "rag.jinja").read_text() == "{{ 2 }}"


def test_what_changes_nothing_is_not_refused(tmp_path: Path) -> None:
    more = {"llama.expert_count": 0, "llama.attention.causal": True, "general.tags": ["a", "b"]}
    write_gguf(tmp_path / "a.gguf", fields=more, tensors={"v.patch.weight": np.ones((2, 2))})
    assert loaded(tmp_path / "a.gguf").shape.layers == 1


def test_unpacked_weights_cannot_stay_packed(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    with pytest.raises(SettingError, match=rf"and {tmp_path / 'a.gguf'} has none"):
        kvlite.load(str(tmp_path / "a.gguf"), device="cpu", weights="gguf")


def test_types_without_products_are_unpacked_and_that_is_said(tmp_path: Path) -> None:
    """256 inputs of IQ3_S blocks, with small scales."""
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (48, 110), np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)
    names = ("blk.0.ffn_gate", "blk.0.ffn_up", "blk.0.ffn_down")
    wide = {"embedding_length": 256, "attention.key_length": 16, "rope.dimension_count": 16}
    shapes = {
        "token_embd": (8, 256),
        "output_norm": (256,),
        "blk.0.attn_norm": (256,),
        "blk.0.ffn_norm": (256,),
        "blk.0.attn_q": (32, 256),
        "blk.0.attn_k": (16, 256),
        "blk.0.attn_v": (16, 256),
        "blk.0.attn_output": (256, 32),
        "blk.0.ffn_down": (256, 48),
    }
    path = tmp_path / "a.gguf"
    write_gguf(
        path,
        without=(*wide, *shapes, *names),
        fields={f"llama.{key}": value for key, value in wide.items()},
        tensors={f"{name}.weight": random.standard_normal(shape) for name, shape in shapes.items()},
        packed={f"{name}.weight": ("IQ3_S", blocks) for name in names[:2]},
    )
    runner = kvlite.load(str(path), device="cpu")
    assert runner.plan is not None
    said = [why for why in runner.plan.changes if "IQ3_S" in why]
    assert said == [
        "weights of type IQ3_S are unpacked while they are loaded, which takes 96.0 KiB"
    ]
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.IQ3_S)
    ours = runner.model.module.state_dict()["model.layers.0.mlp.gate_proj.weight"]
    assert np.array_equal(ours, expected)
    planned = runner.model.shape.weight_bytes(runner.model.weights)
    held = sum(each.nbytes for each in runner.model.module.parameters())
    assert sum(planned.values()) == held


def test_a_bias_that_transformers_would_have_is_zero(tmp_path: Path) -> None:
    """Llama with biases of queries, keys and values alone: transformers has one of outputs, too."""
    random = np.random.default_rng(0)
    biases = {f"blk.0.attn_{of}.bias": random.random(size) for of, size in SIZES.items()}
    write_gguf(tmp_path / "a.gguf", tensors=biases)
    write_gguf(tmp_path / "b.gguf", tensors={**biases, "blk.0.attn_output.bias": np.zeros(32)})
    ours, theirs = (loaded(tmp_path / f"{name}.gguf").module.state_dict() for name in "ab")
    assert ours.keys() == theirs.keys() and any("o_proj.bias" in name for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert kvlite.load(str(tmp_path / "a.gguf"), device="cpu").generate([1, 2], max_new_tokens=2)


@pytest.mark.parametrize("kinds", [("Q8_0", "Q8_0"), ("Q8_0", "Q5_0")])
def test_experts_of_the_first_files_are_those_of_later_ones(
    kinds: tuple[str, str], tmp_path: Path
) -> None:
    """A tensor for each expert; in one format they stay packed."""
    random, types = np.random.default_rng(0), gguf.GGMLQuantizationType
    apart: dict[str, tuple[str, Any]] = {}
    for name, kind in zip(("gate", "up", "down"), (*kinds, kinds[0]), strict=True):
        shape = (32, 64) if name == "down" else (64, 32)
        for expert in range(3):
            weight = random.standard_normal(shape).astype(np.float32)
            apart[f"blk.0.ffn_{name}.{expert}.weight"] = kind, gguf.quantize(weight, types[kind])
    together: dict[str, tuple[str, Any]] = {}
    for name in ("gate", "up", "down"):
        own = [apart[f"blk.0.ffn_{name}.{expert}.weight"] for expert in range(3)]
        together[f"blk.0.ffn_{name}_exps.weight"] = own[0][0], np.stack([each for _, each in own])
    given: dict[str, Any] = {
        "without": ("feed_forward_length", *(f"blk.0.ffn_{of}" for of in ("gate", "up", "down"))),
        "fields": {f"llama.{key}": value for key, value in EXPERTS.items()},
        "tensors": {"blk.0.ffn_gate_inp.weight": random.standard_normal((3, 32))},
    }
    for name, packed in (("first", apart), ("later", together)):
        write_gguf(tmp_path / f"{name}.gguf", packed=packed, **given)
    first, later = (
        kvlite.load(str(tmp_path / f"{name}.gguf"), device="cpu") for name in ("first", "later")
    )
    assert first.plan is not None and later.plan is not None
    is_packed = len({*kinds}) == 1
    said = [why for why in first.plan.changes if "unpacked" in why]
    assert said == [] if is_packed else "type Q8_0, Q5_0 are unpacked" in said[0]
    for runner in (first, later):
        planned = runner.model.shape.weight_bytes(runner.model.weights)
        experts = sum(each.nbytes for each in held_tensors(runner.model.module.model.layers[0].mlp))
        assert planned["mlp"] == experts
    answers = [runner.generate([1, 2, 3], max_new_tokens=6).token_ids for runner in (first, later)]
    assert answers[0] == answers[1]
    fp32 = [loaded(tmp_path / f"{name}.gguf").module.state_dict() for name in ("first", "later")]
    assert all(torch.equal(fp32[0][name], fp32[1][name]) for name in fp32[0])


@pytest.mark.parametrize("dims", [64, 96])
@pytest.mark.parametrize(
    ("theta", "factor", "low", "high", "original"),
    [
        (500_000.0, 8.0, 1.0, 4.0, 8192),
        (10_000.0, 4.0, 2.0, 8.0, 512),
        (1e6, 16.0, 1.0, 1.5, 1000),
        (100.0, 8.0, 1.0, 4.0, 65_536),  # no frequency is divided
    ],
)
def test_llama_3s_divisors_are_its_frequencies(
    theta: float, factor: float, low: float, high: float, original: int, dims: int, tmp_path: Path
) -> None:
    """The divisors as llama.cpp's converter computes them; frequencies as transformers does."""
    stated = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    sizes = {"hidden_size": dims, "num_attention_heads": 1, "head_dim": dims}
    config = transformers.LlamaConfig(**sizes, rope_parameters=stated)
    init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS
    expected, _ = init["llama3"](config, "cpu")
    plain = 1.0 / (theta ** (torch.arange(0, dims, 2).float() / dims))
    divisors = (plain / expected).numpy()
    fields = {
        "llama.rope.freq_base": theta,
        "llama.attention.key_length": dims,
        "llama.rope.dimension_count": dims,
    }
    path = tmp_path / "a.gguf"
    tensors = {"rope_freqs.weight": divisors}
    write_gguf(path, without=("rope.freq_base",), fields=fields, tensors=tensors)
    found = config_of(read_header(path))[0]["rope_parameters"]
    own = transformers.LlamaConfig(**sizes, rope_parameters=found)
    made, scale = (
        (plain, 1.0) if found["rope_type"] == "default" else init[found["rope_type"]](own, "cpu")
    )
    assert scale == 1
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=0)


def test_neighboring_channels_become_halves() -> None:
    """As llama.cpp's converter permutes them."""
    heads, dim = 3, 8
    rows = torch.arange(heads * dim)
    stored = rows.view(heads, 2, dim // 2).transpose(1, 2).flatten()
    assert stored[ORDERS["halves"](heads * dim, heads)].tolist() == rows.tolist()


def test_copies_of_older_versions_are_removed(tmp_path: Path, cache: Path) -> None:
    assert leftovers() == []
    write_gguf(tmp_path / "a.gguf")
    own = gguf_folder(tmp_path / "a.gguf")
    others = "models/a-v1/model.safetensors", "configs/b/config.json", "gguf/a-1-2/gguf.json"
    for name in others:
        (cache / name).parent.mkdir(parents=True)
        (cache / name).write_bytes(b"12345")
    found = leftovers()
    assert [path.name for path in found] == ["models", "configs", "a-1-2"]
    remove_leftovers(found)
    assert [path.name for path in cache.iterdir()] == ["gguf"] and held(cache) == [own.name]


def test_orders_are_permutations() -> None:
    given = {
        "halves": (24, 3),
        "grouped": (4 + 2 * 3 * 5, 4, 2, 3, 5),
        "by_key_head": (2 * (3 + 3 + 4 + 4), 2, 3, 4),
        "alternating": (10,),
    }
    assert {*given} == {*ORDERS}
    for name, (rows, *numbers) in given.items():
        order = ORDERS[name](rows, *numbers)
        assert sorted(order.tolist()) == [*range(rows)] != order.tolist()
