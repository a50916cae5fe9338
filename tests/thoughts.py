"""A model that reasons: a template that begins reasoning, and what the model says word by word."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken

from kvlite.engine.sampling import Sampler
from tests.conftest import SIZES

# Begins reasoning unless it is told not to.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}"
    "{% endif %}"
)
# Reasons, too, and nobody can change that.
STUBBORN = TEMPLATE.partition("{% if enable")[0] + "{% endif %}"
THOUGHT, SAID = "Two and <img src=x> two.\n\nSo `4`?", "It is **four**."
ANSWER = f"{THOUGHT}\n</think>\n\n{SAID}"
_FIRST = 49_152
# A grammar that holds the model to this.
LARK = f'start: "Two and <img src=x> two.\\n\\nSo `4`?\\n" <[{_FIRST + 1}]> "\\n\\nIt is **four**."'


def thinking_model(folder: Path, tiny: Path, template: str = TEMPLATE) -> Path:
    """A tiny random Llama in a folder, with `tiny`'s tokenizer, the marks of reasoning as tokens,
    and a template."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    marks = [AddedToken(each, normalized=False) for each in ("<think>", "</think>")]
    tokenizer.add_tokens(marks)
    assert tokenizer.convert_tokens_to_ids("<think>") == _FIRST
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": _FIRST + 2, "tie_word_embeddings": True}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


def speak(patch: pytest.MonkeyPatch, tokenizer: Any, *answers: str) -> list[int]:
    """Make models say these as far as they may, each to its end; returns the tokens to come."""
    left = list[int]()
    for each in answers:
        left += tokenizer.encode(each, add_special_tokens=False)
        left.append(tokenizer.convert_tokens_to_ids("<|im_end|>"))

    class Script(Sampler):
        def __call__(self, logits: torch.Tensor, ids: Sequence[int]) -> int:
            forced = torch.zeros_like(logits)
            forced[..., left[0]] = 100
            drawn = super().__call__(forced, ids)
            if drawn == left[0]:
                left.pop(0)
            return drawn

    patch.setattr("kvlite.conversation.turn.Sampler", Script)
    return left
