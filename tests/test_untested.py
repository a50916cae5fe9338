"""Architectures that are in no table: what fits is checked and runs, what doesn't is refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvlite
from kvlite.errors import KvliteError, ModelError, SettingError
from kvlite.model.architectures import ADMITTED
from kvlite.model.rotary import require_turnable
from tests.conftest import SIZES
from tests.test_engine import reference_tokens

TURNS = [list(range(3, 90)), list(range(20, 40))]
NOTE = "{} was not tested with kvlite; its first tokens were checked against transformers"
FITTING: dict[str, dict[str, Any]] = {
    "Starcoder2Config": {"sliding_window": 24},
    "Olmo2Config": {},
    "HeliumConfig": {"head_dim": 16},
    "CohereConfig": {},
    "Qwen2MoeConfig": {"num_experts": 4, "num_experts_per_tok": 2},
}
OTHERS = {
    "GPTNeoXConfig": "its class has no model.embed_tokens",
    "StableLmConfig": "its attention cannot be replaced",
    "NemotronConfig": "its layers do not run: ",
    "DiffLlamaConfig": "its layers are not attention and an MLP",
    "GPT2Config": "kvlite was not tested with 'gpt2' models: .* has no hidden_size",
}


def saved(config: Any, tokenizer: Path, folder: Path) -> Any:
    """A model of random weights that count, saved with a tokenizer."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.eval().parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.tie_weights()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    return model


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", FITTING)
def test_what_fits_says_what_transformers_says_and_that_it_was_not_tested(
    name: str, tiny_folder: Path, tmp_path: Path
) -> None:
    sizes = {**SIZES, "vocab_size": 49_152, **FITTING[name]}
    config = getattr(transformers, name)(**sizes)
    assert config.model_type not in ADMITTED
    reference, told = saved(config, tiny_folder, tmp_path), list[str]()
    runner = kvlite.load(str(tmp_path), weights="fp32", notify=told.append)
    assert told[0] == NOTE.format(tmp_path)
    talk, ids = runner.conversation(method="full"), list[int]()
    for turn in TURNS:
        answer = talk.generate(turn, max_new_tokens=12, ignore_eos=True).token_ids
        ids += turn
        assert answer == reference_tokens(reference, ids, 12)
        ids += answer
    with pytest.raises(SettingError, match="its architecture was not tested"):
        require_turnable(runner.model, "lminfinite:limit=true")
    with pytest.raises(SettingError, match="cannot check while weights are streamed"):
        kvlite.load(str(tmp_path), stream="disk")


@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_experts_that_nobody_tested_are_not_quantized(weights: str, tmp_path: Path) -> None:
    config = transformers.Qwen2MoeConfig(**{**SIZES, **FITTING["Qwen2MoeConfig"]})
    transformers.Qwen2MoeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(SettingError, match=f"its experts cannot become {weights}, use --weights b"):
        kvlite.load(str(tmp_path), weights=weights)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", OTHERS)
def test_what_does_not_fit_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    config = getattr(transformers, name)(**{**SIZES, "head_dim": 16})
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(KvliteError, match=OTHERS[name]):
        kvlite.load(str(tmp_path))


class SabotagedConfig(transformers.LlamaConfig):
    """Of a model that looks like a Llama."""

    model_type = "sabotaged"


class SabotagedForCausalLM(transformers.LlamaForCausalLM):
    """A Llama that does something of which its parts show nothing."""

    config_class = SabotagedConfig
    sabotage: Callable[[Any], Any] | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        inner, own = self.model, inner_forward(self.model)

        def forward(*given: Any, **options: Any) -> Any:
            found = own(*given, **options)
            if type(self).sabotage is not None:
                found.last_hidden_state = type(self).sabotage(found.last_hidden_state)
            return found

        inner.forward = forward


def inner_forward(model: Any) -> Callable[..., Any]:
    own: Callable[..., Any] = model.forward
    return own


@pytest.fixture
def sabotaged() -> Iterator[type[SabotagedForCausalLM]]:
    transformers.AutoConfig.register("sabotaged", SabotagedConfig, exist_ok=True)
    auto = transformers.AutoModelForCausalLM
    auto.register(SabotagedConfig, SabotagedForCausalLM, exist_ok=True)
    yield SabotagedForCausalLM
    SabotagedForCausalLM.sabotage = None


def nothing(hidden: Tensor) -> Tensor:
    return hidden


def slightly_more(hidden: Tensor) -> Tensor:
    return hidden * 1.01


def of_the_token_before(hidden: Tensor) -> Tensor:
    """Right for the first token alone."""
    return hidden + 0.1 * hidden.roll(1, 1)


def test_a_class_that_does_more_than_its_parts_is_refused(
    sabotaged: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    config = SabotagedConfig(**{**SIZES, "vocab_size": 49_152})
    saved(config, tiny_folder, tmp_path)
    for change in (slightly_more, of_the_token_before):
        sabotaged.sabotage = staticmethod(change)
        with pytest.raises(ModelError, match="'sabotaged' model, which kvlite was not tested"):
            kvlite.load(str(tmp_path), weights="fp32")
    sabotaged.sabotage = staticmethod(nothing)
    kvlite.load(str(tmp_path), weights="fp32")
