"""Models of real shapes with random weights, made on the device."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from kvlite.config.settings import Settings
from kvlite.conversation.runner import Runner
from kvlite.model.attention_interface import ATTENTION, register_attention
from kvlite.model.load import LoadedModel
from kvlite.model.packed_linear import PackedLinear, PackedWeights
from kvlite.model.shape import shape_of
from kvlite.model.transformers_lock import meta_module
from kvlite.model.weights import PLAIN, Weights
from kvlite.ops.blocks import BlockFormat
from tests.conftest import EXPERTS, SIZES, IntegerTokenizer, made_up_calibration

GIB = 2**30


@dataclass(frozen=True)
class Place:
    """Where the parts run, and how large.

    Attributes:
        large, small: sizes of the models, as transformers' LlamaConfig has them; the small one is
            written to a folder and loaded from it.
        experts: likewise, as Qwen3MoeConfig has them.
        short, long, longest: tokens read.
        budget: entries a KV head keeps.
        cap: bytes of the device that may be taken, as on a card of 24 GB.
        rehearsal: on a CPU with tiny models, to see that the parts run.
    """

    device: torch.device
    dtype: torch.dtype
    large: dict[str, Any]
    small: dict[str, Any]
    experts: dict[str, Any]
    short: int
    long: int
    longest: int
    budget: int
    answer: int
    cap: int
    rehearsal: bool = False

    def large_model(self) -> LoadedModel:
        """Random weights in the large shape."""
        return random_model(transformers.LlamaConfig(**self.large), self.device, self.dtype)

    def experts_model(self) -> LoadedModel:
        """Likewise, with many small experts."""
        config = transformers.Qwen3MoeConfig(**self.experts)
        return random_model(config, self.device, self.dtype)

    def runner(self, model: LoadedModel, **settings: Any) -> Runner:
        """Answers of a model, greedily and of full length."""
        given = {"budget": str(self.budget), "temperature": 0.0, "speculate": "off", **settings}
        return Runner(model, Settings().replace(given))

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        """Token ids that mean nothing."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, self.large["vocab_size"], (count,), generator=generator).tolist()


LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262_144,
}
LLAMA_1B = {
    **LLAMA_8B,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
# Qwen3-30B-A3B, of which a card of 24 GB has room for a quarter in bfloat16.
QWEN_MOE = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 262_144,
}


def on_a_card() -> Place:
    """Llama-3.1-8B's shape in bfloat16, with 24 GB of the card."""
    return Place(
        torch.device("cuda", 0),
        torch.bfloat16,
        large=LLAMA_8B,
        small=LLAMA_1B,
        experts=QWEN_MOE,
        short=8192,
        long=32_768,
        longest=131_072,
        budget=2048,
        answer=64,
        cap=24 * GIB,
    )


def rehearsal() -> Place:
    """The same on a CPU in seconds; its figures say nothing."""
    return Place(
        torch.device("cpu"),
        torch.float32,
        large=SIZES,
        small=SIZES,
        experts={**SIZES, **EXPERTS, "head_dim": 16},
        short=64,
        long=128,
        longest=256,
        budget=48,
        answer=6,
        cap=GIB,
        rehearsal=True,
    )


def random_model(config: Any, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """A model whose weights nobody trained."""
    register_attention()
    module = meta_module(config, dtype, attention=ATTENTION).to_empty(device=device)
    module.tie_weights()
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        if "norm" in name:
            torch.nn.init.ones_(parameter.data)
        else:
            torch.nn.init.normal_(parameter.data, std=0.02)
    # Buffers came without numbers, too.
    module.model.rotary_emb = type(module.model.rotary_emb)(config).to(device)
    module.eval().requires_grad_(False)
    shape = shape_of(config)
    name = next(name for name in PLAIN if PLAIN[name] == dtype)
    return LoadedModel(
        module,
        IntegerTokenizer(),
        shape,
        Path(),
        Weights(name, dtype),
        frozenset({2}),
        made_up_calibration(shape),
    )


def save_random(sizes: dict[str, Any], folder: Path, device: torch.device) -> None:
    """A folder that `kvlite.load` opens: random weights in bfloat16, and a tokenizer of numbers."""
    config = transformers.LlamaConfig(**sizes)
    random_model(config, device, torch.bfloat16).module.save_pretrained(folder)
    words = {str(number): number for number in range(sizes["vocab_size"])}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), eos_token="2"
    )
    tokenizer.save_pretrained(folder)


def pack_at_random(module: Any, form: BlockFormat, dtype: torch.dtype) -> None:
    """Let linear layers have blocks of a format, of small scales and codes that mean nothing."""
    for part in [*module.modules()]:
        for name, child in [*part.named_children()]:
            if type(child) is not torch.nn.Linear:
                continue
            size = child.out_features, child.in_features // form.inputs, form.nbytes
            packed = torch.randint(256, size, dtype=torch.uint8, device=child.weight.device)
            halves = 2 if form.has_least else 1
            packed[:, :, : 2 * halves].view(torch.float16)[:] = 2.0**-10
            setattr(part, name, PackedLinear(PackedWeights(packed.flatten(1), form, dtype)))
