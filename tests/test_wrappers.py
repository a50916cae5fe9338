"""Models whose language model is one part of several: it alone is loaded, and says the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import kvlite
from kvlite.errors import ModelError
from kvlite.model.shape import read_shape
from tests.conftest import (
    ALTERNATING,
    ARCHITECTURES,
    DELTA_NETS,
    EXPERTS,
    GEMMA,
    LENDING,
    PER_LAYER,
    SHARED,
    SIZES,
)

VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
IDS = [list(range(3, 90)), list(range(20, 40))]


def gemma3() -> Any:
    sizes = {**SIZES, "vocab_size": 49_152, **ALTERNATING, **GEMMA}
    text = transformers.Gemma3TextConfig(**sizes)
    vision = transformers.SiglipVisionConfig(**VISION)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    return transformers.Gemma3ForConditionalGeneration(config)


def ministral3() -> Any:
    _, own = ARCHITECTURES["ministral3"]
    return mistral3(transformers.Ministral3Config(**{**SIZES, "vocab_size": 49_152, **own}))


def mistral3(text: Any = None) -> Any:
    if text is None:
        text = transformers.MistralConfig(**{**SIZES, "vocab_size": 49_152}, sliding_window=None)
    vision = transformers.PixtralVisionConfig(**{**VISION, "head_dim": 16})
    config = transformers.Mistral3Config(
        text_config=text, vision_config=vision, tie_word_embeddings=False
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def qwen3_5(name: str = "", **more: Any) -> Any:
    text = {**SIZES, "vocab_size": 49_152, **DELTA_NETS, "head_dim": 16, **more}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": SIZES["hidden_size"],
        "num_position_embeddings": 16,
    }
    config = getattr(transformers, f"Qwen3_5{name}Config")(text_config=text, vision_config=vision)
    return getattr(transformers, f"Qwen3_5{name}ForConditionalGeneration")(config)


def qwen3_5_moe() -> Any:
    return qwen3_5("Moe", **EXPERTS, **SHARED)


def gemma4() -> Any:
    sizes = {
        **SIZES,
        "vocab_size": 49_152,
        **LENDING,
        **PER_LAYER,
        "vocab_size_per_layer_input": 49_152,
    }
    text = transformers.Gemma4TextConfig(**sizes, head_dim=16, global_head_dim=32)
    vision = transformers.Gemma4VisionConfig(
        **{name: size for name, size in VISION.items() if "image" not in name}
    )
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
    return transformers.Gemma4ForConditionalGeneration(config)


def llama4() -> Any:
    _, own = ARCHITECTURES["llama4"]
    text = transformers.Llama4TextConfig(**{**SIZES, "vocab_size": 49_152, **own})
    sizes = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    vision = transformers.Llama4VisionConfig(**VISION, **sizes)
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    return transformers.Llama4ForConditionalGeneration(config)


MODELS = {
    "gemma3": gemma3,
    "gemma4": gemma4,
    "llama4": llama4,
    "ministral3": ministral3,
    "mistral3": mistral3,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
}


@pytest.fixture(params=MODELS)
def whole(request: pytest.FixtureRequest) -> Any:
    return made(request.param)


def made(name: str) -> Any:
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.tie_weights()
    return model


@pytest.fixture
def folder(whole: Any, tiny_folder: Path, tmp_path: Path) -> Path:
    whole.save_pretrained(tmp_path / "whole")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "whole" / name).write_bytes((tiny_folder / name).read_bytes())
    return tmp_path / "whole"


def renamed(folder: Path) -> set[str]:
    """The other of the two ways in which transformers names the weights."""
    file = folder / "model.safetensors"
    weights = load_file(file)

    def other(name: str) -> str:
        for old, new in (
            ("language_model.model.", "model.language_model."),
            ("model.language_model.", "language_model.model."),
            ("language_model.lm_head.", "lm_head."),
            ("lm_head.", "language_model.lm_head."),
        ):
            if name.startswith(old):
                return name.replace(old, new, 1)
        return name

    names = {other(name): tensor for name, tensor in weights.items()}
    assert set(names) != set(weights)
    save_file(names, file, {"format": "pt"})
    return set(names)


def answers(talk: kvlite.Conversation) -> list[list[int]]:
    return [talk.generate(ids, max_new_tokens=12, ignore_eos=True).token_ids for ids in IDS]


@pytest.mark.cases(1)
def test_its_language_model_says_what_the_whole_says(whole: Any, folder: Path) -> None:
    """Over two turns, whichever way its weights are named, read at once or layer by layer."""
    expected, ids = [], list[int]()
    for turn in IDS:
        ids += turn
        with torch.no_grad():
            prompt = torch.tensor([ids])
            out = whole.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=12,
                min_new_tokens=12,
                do_sample=False,
                eos_token_id=None,
            )
        said = out[0, len(ids) :].tolist()
        expected.append(said)
        ids += said
    for stream in ("off", "disk"):
        talk = kvlite.load(str(folder), stream=stream).conversation(method="full")
        assert answers(talk) == expected
    renamed(folder)
    for stream in ("off", "disk"):
        runner = kvlite.load(str(folder), stream=stream)
        assert answers(runner.conversation(method="full")) == expected
    assert not any("vision" in name for name, _ in runner.model.module.named_parameters())


def test_a_plan_counts_the_language_model_alone(whole: Any, folder: Path) -> None:
    shape = read_shape(folder)
    text = whole.get_decoder()
    assert shape.layers == 4 and shape.model_type == text.config.model_type
    both = *text.parameters(), *whole.get_output_embeddings().parameters()
    counted = sum(shape.parameters.values())
    assert counted == sum(each.numel() for each in {id(each): each for each in both}.values())


def test_what_gemma_leaves_out_is_that_of_its_class_and_what_cannot_run_is_refused(
    tmp_path: Path,
) -> None:
    made("gemma3").config.save_pretrained(tmp_path)
    path, known = tmp_path / "config.json", transformers.Gemma3TextConfig()
    config = json.loads(path.read_text())
    keys = ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    left_out = (*keys, "max_position_embeddings", "model_type")
    text = {key: value for key, value in config["text_config"].items() if key not in left_out}
    path.write_text(json.dumps({**config, "text_config": text}))
    shape = read_shape(tmp_path)
    assert (shape.heads, shape.kv_heads) == (known.num_attention_heads, known.num_key_value_heads)
    assert (shape.head_dim, shape.vocab) == (known.head_dim, known.vocab_size)
    assert shape.max_context == known.max_position_embeddings
    for change, said in (
        ({"text_config": None}, "text_config"),
        ({"text_config": 5}, "text_config"),
        ({"text_config": {"model_type": "gpt-oss"}}, "not tested with .gpt-oss. models"),
        ({"quantization_config": {"quant_method": "awq"}}, "unquantized weights"),
        ({"text_config": {"model_type": "llama"}}, "hidden_size"),
    ):
        path.write_text(json.dumps({**config, **change}))
        with pytest.raises(ModelError, match=said):
            read_shape(tmp_path)
