"""Finding, describing and loading a model: right about good ones, one sentence about bad ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import kvlite.model.gguf as conversion
from kvlite.cache import KVSize
from kvlite.config.settings import Settings
from kvlite.conversation.runner import open_runner
from kvlite.errors import ModelError
from kvlite.model.architectures import ADMITTED
from kvlite.model.cpu import SplitLinear, split_linears
from kvlite.model.gguf import converted_folder
from kvlite.model.load import LoadedModel, load_model
from kvlite.model.shape import ModelShape, read_shape
from kvlite.model.source import _embedded_gguf, find_model
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


# --- finding it ----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("tokens", [0, 1, 23, 24, 25, 300])
def test_full_kv_bytes_equal_a_count_of_what_can_be_seen(tiny: Tiny, tokens: int) -> None:
    shape = tiny.model.shape
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


@pytest.mark.parametrize("name", ["half a tokenizer", "empty tokenizer"])
def test_a_broken_tokenizer_is_refused_where_a_text_is_to_be_counted(
    name: str, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    BROKEN[name][0](folder)
    with pytest.raises(ModelError, match="cannot be loaded") as error:
        open_runner(Settings(model=str(folder), device="cpu"), None, lambda tokenizer: 9)
    assert str(folder) in str(error.value)


@pytest.mark.cases(1)
@pytest.mark.parametrize("stream", ["off", "disk"])
def test_a_tokenizer_is_read_once(
    stream: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To count what is to be read, and for the model."""
    auto, counted = transformers.AutoTokenizer, []
    read, usual = [], auto.from_pretrained

    def from_pretrained(folder: Path, **options: Any) -> Any:
        read.append(folder)
        return usual(folder, **options)

    monkeypatch.setattr(auto, "from_pretrained", from_pretrained)
    settings = Settings(model=str(tiny_folder), device="cpu", stream=stream)
    runner = open_runner(
        settings, None, lambda tokenizer, max_context: counted.append(tokenizer) or 9
    )
    assert len(read) == 1 and counted == [runner.tokenizer]


@pytest.mark.parametrize(
    "name", ["gpt2", "no config", "config of words", "config is a list", "no heads", "no layers"]
)
def test_a_broken_config_has_no_shape(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_folder / "config.json", tmp_path)
    BROKEN[name][0](tmp_path)
    with pytest.raises(ModelError) as error:
        read_shape(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where", "~/no/where", "a/b/c"])
def test_a_model_that_is_nowhere_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"no model '{name}': give 'smollm2-135m'"):
        find_model(name)


def test_an_id_that_is_not_here_offline_is_refused() -> None:
    with pytest.raises(ModelError, match="kvlite/no-such-model is not in the local"):
        find_model("kvlite/no-such-model")


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    for name, reason in (("a.safetensors", "is a file but not a .gguf"), ("a.gguf", "first bytes")):
        (tmp_path / name).write_bytes(b"whatever this is")
        with pytest.raises(ModelError, match=reason):
            find_model(str(tmp_path / name))


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


# --- GGUF ----------------------------------------------------------------------------------------

VOCABULARY = ["<|end|>", "a", "b", "c", "d", "\u0120", "ab", "cd"]
BLOCK = {
    "attn_norm": (32,),
    "ffn_norm": (32,),
    "attn_q": (32, 32),
    "attn_k": (16, 32),
    "attn_v": (16, 32),
    "attn_output": (32, 32),
    "ffn_gate": (48, 32),
    "ffn_up": (48, 32),
    "ffn_down": (32, 48),
}


def write_gguf(
    path: Path, *, seed: int = 0, architecture: str = "llama", without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A Llama of one layer with eight tokens; returns its weights."""
    file = gguf.GGUFWriter(path, architecture)
    file.add_block_count(1)
    file.add_context_length(64)
    file.add_embedding_length(32)
    file.add_feed_forward_length(48)
    file.add_head_count(2)
    file.add_head_count_kv(1)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_freq_base(10_000.0)
    file.add_vocab_size(len(VOCABULARY))
    if "tokenizer" not in without:
        file.add_tokenizer_model("gpt2")
        file.add_tokenizer_pre("smollm")
        file.add_token_list(VOCABULARY)
        file.add_token_types([3] + [1] * (len(VOCABULARY) - 1))
        file.add_token_merges(["a b", "c d"])
        file.add_eos_token_id(0)
    shapes = {"token_embd": (len(VOCABULARY), 32), "output_norm": (32,)}
    shapes |= {f"blk.0.{name}": shape for name, shape in BLOCK.items()}
    generator = np.random.default_rng(seed)
    weights = {
        f"{name}.weight": generator.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
        if name not in without
    }
    for name, weight in weights.items():
        file.add_tensor(name, weight)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return weights


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for converted models."""
    monkeypatch.setenv("KVLITE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def held(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


def fake_conversion(file: Path, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(file.read_bytes())


def here(work: Callable[..., Any], *given: Any, **_: Any) -> Any:
    """Instead of `run_in_child`, where a test puts something in the place of the work."""
    return work(*given)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "run_in_child", here)


@pytest.mark.long
def test_a_gguf_becomes_a_folder_that_loads(cache: Path, tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "a.gguf")
    notices: list[str] = []
    folder = find_model(str(tmp_path / "a.gguf"), notices.append)
    assert held(cache) == [folder.name]
    assert len(notices) == 1 and "Converting a.gguf" in notices[0]
    model = load_from(folder)
    assert model.stop_ids == {0}
    assert model.tokenizer.encode("abcd") == [6, 7]
    ours = model.module.state_dict()
    assert np.array_equal(ours["model.embed_tokens.weight"], weights["token_embd.weight"])
    up = ours["model.layers.0.mlp.up_proj.weight"]
    assert np.array_equal(up, weights["blk.0.ffn_up.weight"])
    assert find_model(str(tmp_path / "a.gguf"), notices.append) == folder
    assert len(notices) == 1


@pytest.mark.usefixtures("in_process")
def test_conversions_are_kept_by_content_and_name(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_convert", fake_conversion)
    first, elsewhere, renamed = (tmp_path / name for name in ("a.gguf", "b/a.gguf", "c.gguf"))
    elsewhere.parent.mkdir()
    write_gguf(first)
    folder = converted_folder(first)
    for copy in (elsewhere, renamed):
        shutil.copy(first, copy)
    assert converted_folder(elsewhere) == folder
    assert converted_folder(renamed).name == folder.name.replace("a-", "c-")
    write_gguf(first, seed=1)
    assert converted_folder(first) != folder
    assert len(held(cache)) == 3
    assert (folder / "model.safetensors").read_bytes() == elsewhere.read_bytes()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("crash", "seen"), [(KeyError("rope"), ModelError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_a_conversion_that_breaks_off_leaves_nothing(
    crash: BaseException,
    seen: type[BaseException],
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_gguf(tmp_path / "a.gguf")
    partial: list[Path] = []

    def break_off(file: Path, folder: Path) -> None:
        fake_conversion(file, folder)
        partial.append(folder)
        raise crash

    monkeypatch.setattr(conversion, "_convert", break_off)
    with pytest.raises(seen):
        converted_folder(tmp_path / "a.gguf")
    assert partial[0].name.startswith(".partial-") and partial[0].parent == cache
    assert held(cache) == []
    monkeypatch.setattr(conversion, "_convert", fake_conversion)
    folder = converted_folder(tmp_path / "a.gguf")
    assert held(cache) == [folder.name]


@pytest.mark.usefixtures("in_process")
def test_someone_else_may_finish_the_same_conversion_first(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "a.gguf")
    monkeypatch.setattr(conversion, "_convert", fake_conversion)
    folder = converted_folder(tmp_path / "a.gguf")
    shutil.rmtree(folder)

    def overtaken(file: Path, partial: Path) -> None:
        fake_conversion(file, partial)
        folder.mkdir()
        (folder / "model.safetensors").write_text("theirs")

    monkeypatch.setattr(conversion, "_convert", overtaken)
    assert converted_folder(tmp_path / "a.gguf") == folder
    assert (folder / "model.safetensors").read_text() == "theirs"
    assert held(cache) == [folder.name]


def test_a_truncated_gguf_is_refused_and_nothing_is_written(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "half.gguf"
    with _embedded_gguf().open("rb") as whole:
        start = whole.read(4 << 20)
    write_gguf(tmp_path / "tiny.gguf")
    tiny = (tmp_path / "tiny.gguf").read_bytes()
    for content in (start, b"", start[:3], *(tiny[:n] for n in (4, 8, 20, 24, 100, 1000, -1))):
        file.write_bytes(content)
        with pytest.raises(ModelError, match=r"half\.gguf is (truncated|not a GGUF)"):
            converted_folder(file)
    assert held(cache) == []


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "gpt2"}, "'gpt2' model, which kvlite does not run"),
        ({"architecture": "gpt-oss"}, "from a GGUF file; use the safetensors"),
        ({"without": ("tokenizer",)}, "cannot be converted: .*tokenizer"),
        ({"without": ("blk.0.ffn_up",)}, r"mlp\.up_proj\.weight is missing"),
    ],
)
def test_a_gguf_that_cannot_be_converted_is_refused(
    changes: dict[str, Any], reason: str, cache: Path, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "a.gguf", **changes)
    with pytest.raises(ModelError, match=reason) as error:
        converted_folder(tmp_path / "a.gguf")
    assert str(tmp_path / "a.gguf") in str(error.value) and "\n" not in str(error.value)
    assert held(cache) == []


# --- linear layers on a CPU ----------------------------------------------------------------------


def split(linear: nn.Linear, threads: int) -> SplitLinear:
    torch.set_num_threads(threads)
    return SplitLinear(linear)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(48, 96), (96, 48), (64, 64), (64, 97), (97, 64), (33, 7), (7, 31)]
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


@pytest.mark.parametrize(("inputs", "outputs"), [(48, 96), (96, 48)])
def test_a_split_linear_splits_without_a_copy_of_the_weights(inputs: int, outputs: int) -> None:
    ours = split(nn.Linear(inputs, outputs), 2)
    assert ours.parts > 1 and ours.shares.shape[0] == ours.parts
    assert ours.shares.untyped_storage().data_ptr() == ours.weight.untyped_storage().data_ptr()
    assert ours.weight.shape == (outputs, inputs)


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
