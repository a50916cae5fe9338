"""Finding, describing and loading a model: right about good ones, one sentence about bad ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kvlite.cache import KVSize
from kvlite.errors import ModelError
from kvlite.model.architectures import ADMITTED
from kvlite.model.cpu import SplitLinear, split_linears
from kvlite.model.load import LoadedModel, load_model
from kvlite.model.shape import ModelShape, read_shape
from kvlite.model.source import find_model
from kvlite.model.weights import Weights
from tests.conftest import PARTS, SIZES, Tiny, parts_of

Change = Callable[[Path], object]

EVERY_LAYER, EVERY_OTHER = (24,) * 4, (24, None, 24, None)
WINDOWS: dict[str, tuple[int | None, ...]] = {
    "mistral": EVERY_LAYER,
    "phi3": EVERY_LAYER,
    "qwen2": EVERY_OTHER,
    "gemma2": EVERY_OTHER,
    "gemma3_text": EVERY_OTHER,
    "gemma3n_text": EVERY_OTHER,
    "gemma4_text": EVERY_OTHER,
    "olmo3": EVERY_OTHER,
    "exaone4": EVERY_OTHER,
    "cohere2": EVERY_OTHER,
    "gpt_oss": EVERY_OTHER,
    "llama4_text": EVERY_OTHER,
}


def save_config(config: Any, folder: Path) -> ModelShape:
    config.save_pretrained(folder)
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    return read_shape(folder)


# --- the shape, from a config alone --------------------------------------------------------------


def test_the_shape_counts_the_weights_of_the_real_model(tiny: Tiny, tmp_path: Path) -> None:
    shape = save_config(tiny.reference.config, tmp_path)
    assert sum(shape.parameters.values()) == sum(p.numel() for p in tiny.reference.parameters())
    beside = [
        p
        for name, p in tiny.reference.model.named_parameters()
        if not name.startswith("layers.") and "norm" not in name
    ]
    assert shape.parameters["embedding"] == sum(p.numel() for p in beside)
    norms = [p for name, p in tiny.reference.named_parameters() if "norm" in name]
    assert shape.parameters["norms"] == sum(p.numel() for p in norms)
    for group in PARTS:
        every = [part for each in tiny.reference.model.layers for part in parts_of(each, group)]
        named = [pair for module in every for pair in module.named_parameters()]
        assert shape.parameters[group] == sum(p.numel() for name, p in named if "norm" not in name)


@pytest.mark.cases(15)
def test_the_shape_has_the_sizes_of_the_real_cache(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny.reference.config
    shape = save_config(config, tmp_path)
    with torch.no_grad():
        past = tiny.reference(torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values
    attending = [each for each in past.layers if getattr(each, "keys", None) is not None]
    latent = ADMITTED[config.model_type].latent
    assert [(1, 3)] * shape.layers == [tuple(each.keys.shape[:3:2]) for each in attending]
    assert list(shape.kv_sizes) == [
        KVSize(each.keys.shape[1], each.keys.shape[3] + latent * each.values.shape[3], latent)
        for each in attending
    ]
    assert len(attending) == shape.layers == len(shape.windows)
    recurrent = [each for each in past.layers if getattr(each, "conv_states", None)]
    assert len(recurrent) == shape.recurrent_layers
    _, window = ADMITTED[config.model_type].short_sight
    sliding = config.model_type in WINDOWS and getattr(config, window, None)
    assert shape.window_sizes == (WINDOWS[config.model_type] if sliding else (None,) * 4)
    assert shape.full_layers == tuple(i for i in range(4) if shape.windows[i] is None)


def test_full_kv_bytes_equal_a_count_of_what_can_be_seen(tiny: Tiny) -> None:
    for tokens in (0, 1, 23, 24, 25, 300):
        require_kv_bytes(tiny.model.shape, tokens)


def require_kv_bytes(shape: ModelShape, tokens: int) -> None:
    numbers = 0
    for window, size in zip(shape.windows, shape.kv_sizes, strict=True):
        for position in range(tokens):
            if (
                window is None
                or (window.chunked and position // window.size == tokens // window.size)
                or (not window.chunked and position > tokens - 1 - window.size)
            ):
                numbers += size.heads * size.dim * (1 if size.latent else 2)
    assert shape.full_kv_bytes(tokens, 2) == 2 * numbers
    assert shape.full_kv_bytes(tokens, 4, batch=3) == 12 * numbers


@pytest.mark.parametrize(
    ("kind", "sizes", "parameters", "kv_bytes"),
    [
        ("Llama", (128_256, 4096, 14_336, 32, 32, 8), 8_030_261_248, 131_072),
        ("Mistral", (32_000, 4096, 14_336, 32, 32, 8), 7_241_732_096, 131_072),
        ("Qwen2", (152_064, 3584, 18_944, 28, 28, 4), 7_615_616_512, 57_344),
    ],
)
def test_shapes_of_well_known_models(
    kind: str, sizes: tuple[int, ...], parameters: int, kv_bytes: int, tmp_path: Path
) -> None:
    """Parameters as on their model cards, and bfloat16 bytes a token."""
    named = dict(zip(list(SIZES)[:6], sizes, strict=True))
    options = {"tie_word_embeddings": False, "max_position_embeddings": 32_768}
    config = getattr(transformers, f"{kind}Config")(**named, **options)
    shape = save_config(config, tmp_path)
    assert sum(shape.parameters.values()) == parameters
    assert shape.full_kv_bytes(1, 2) == kv_bytes


def test_a_window_as_long_as_the_context_never_slides(tmp_path: Path) -> None:
    for window, expected in ((1023, 1023), (1024, None), (4096, None)):
        config = transformers.MistralConfig(**SIZES, sliding_window=window)
        assert save_config(config, tmp_path).window_sizes == (expected,) * 4


# --- refusals ------------------------------------------------------------------------------------


def edit_json(name: str, **values: Any) -> Change:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **values}))

    return change


def write(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def config(**values: Any) -> Change:
    return edit_json("config.json", **values)


def without_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def cut_in_half(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


BROKEN: dict[str, tuple[Change, str]] = {
    "gpt2": (
        config(model_type="gpt2"),
        "'gpt2' model, which kvlite was not tested with and cannot run",
    ),
    "no model type": (write("config.json", "{}"), "config.json has no model_type"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "it has no config.json"),
    "config of words": (write("config.json", "a llama"), "config.json is not readable JSON"),
    "config of bytes": (
        lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"),
        "config.json is not readable JSON",
    ),
    "config is a list": (write("config.json", "[]"), "not a JSON object"),
    "config is null": (write("config.json", "null"), "not a JSON object"),
    "no heads": (config(num_attention_heads=0), "num_attention_heads is 0"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers is 0"),
    "a word for a size": (config(hidden_size="wide"), "hidden_size"),
    "unknown activation": (config(hidden_act="abracadabra"), "abracadabra"),
    "unknown rotation": (config(rope_parameters={"rope_type": "abracadabra"}), "abracadabra"),
    "other sizes": (config(intermediate_size=48), r"gate_proj|up_proj|down_proj"),
    "too few layers": (config(num_hidden_layers=5), r"layers\.4\..* is missing \(one of 9\)"),
    "a weight short": (without_weight, r"layers\.1\.mlp\.up_proj\.weight is missing \(one of 1\)"),
    "half a file": (cut_in_half, "cannot be loaded"),
    "no bytes": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "loaded"),
    "only a pickle": (pickled, r"it holds pytorch_model.bin, which can run code"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no .safetensors"),
    "half a tokenizer": (write("tokenizer.json", '{"version'), "cannot be loaded"),
    "empty tokenizer": (write("tokenizer.json", "{}"), "cannot be loaded"),
}


def load_from(folder: Path) -> LoadedModel:
    return load_model(
        find_model(str(folder)), device=torch.device("cpu"), weights=Weights("fp32", torch.float32)
    )


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_in_one_sentence(
    name: str, tiny_folder: Path, tmp_path: Path
) -> None:
    change, reason = BROKEN[name]
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    change(folder)
    with pytest.raises(ModelError, match=reason) as error:
        load_from(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where", "~/no/where", "a/b/c"])
def test_a_model_that_is_nowhere_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"no model '{name}': give 'smollm2-135m'"):
        find_model(name)


def test_an_id_that_is_not_here_offline_is_refused() -> None:
    with pytest.raises(ModelError, match="kvlite/no-such-model is not in the local"):
        find_model("kvlite/no-such-model")


# --- nothing in a folder is executed -------------------------------------------------------------

CODE = """
open({ran!r}, "w").close()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig): pass
class Model(LlamaForCausalLM): pass
class Tokenizer(PreTrainedTokenizerFast): pass
"""
OWN_MODEL = config(auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
OWN_TOKENIZER = edit_json(
    "tokenizer_config.json",
    tokenizer_class="Tokenizer",
    auto_map={"AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"]},
)


class Exploit:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    ("changes", "loads"),
    [
        ((OWN_MODEL,), True),  # transformers' own Llama, whatever the config maps it to
        ((OWN_TOKENIZER,), False),
        ((OWN_MODEL, pickled), False),
    ],
)
def test_nothing_in_a_folder_is_executed(
    changes: tuple[Change, ...],
    loads: bool,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = tmp_path / "ran"
    # transformers asks on the terminal before it runs foreign code.
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    (folder / "own.py").write_text(CODE.format(ran=str(ran)))
    for change in changes:
        change(folder)
    if pickled in changes:
        torch.save(Exploit(ran), folder / "pytorch_model.bin")
    if loads:
        assert type(load_from(folder).module) is transformers.LlamaForCausalLM
    else:
        with pytest.raises(ModelError):
            load_from(folder)
    assert not ran.exists()


def test_the_bait_is_real(tmp_path: Path) -> None:
    """So that the test above can fail."""
    torch.save(Exploit(tmp_path / "ran"), tmp_path / "weights.bin")
    torch.load(tmp_path / "weights.bin", weights_only=False)
    assert (tmp_path / "ran").exists()


# --- linear layers on a CPU ----------------------------------------------------------------------


def split(linear: nn.Linear, threads: int) -> SplitLinear:
    torch.set_num_threads(threads)
    return SplitLinear(linear)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias"), [(48, 96, True), (96, 48, False), (64, 97, False), (33, 7, True)]
)
def test_a_split_linear_equals_a_linear(
    inputs: int, outputs: int, bias: bool, threads: int
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias=bias)
    rows = [torch.randn(*shape, inputs) for shape in ((), (1,), (1, 1), (5,), (1, 5), (3, 1))]
    expected = [linear(row) for row in rows]
    ours = split(linear, threads)
    for row, right in zip(rows, expected, strict=True):
        assert ours(row).shape == right.shape
        assert (ours(row) - right).abs().max() < 1e-6


def test_split_linears_leave_a_tied_embedding_tied() -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True)
    ).eval()

    def logits(ids: list[int]) -> Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits

    prompts = [[5], [5, 6, 7]]
    before = [logits(ids) for ids in prompts]
    linears = sum(type(module) is nn.Linear for module in model.modules())
    split_linears(model)
    assert sum(type(module) is SplitLinear for module in model.modules()) == linears == 29
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for ids, right in zip(prompts, before, strict=True):
        assert (logits(ids) - right).abs().max() < 1e-5
