"""How likely tokens were, by the model's own logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chance:
    """A token and its log probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class Chances:
    """Those of one place in a text.

    Attributes:
        own: the token that is there.
        best: the likeliest ones, the best first.
    """

    own: Chance
    best: tuple[Chance, ...]


@torch.inference_mode()
def chances(logits: Tensor, token_id: int, top: int) -> Chances:
    """The log probability of a token, and of the `top` likeliest, from logits `(vocab,)` before
    temperature and penalties."""
    logprobs = logits.float().log_softmax(-1)
    values, indices = logprobs.topk(min(top, logprobs.numel()))
    best = map(Chance, indices.tolist(), values.tolist())
    return Chances(Chance(token_id, float(logprobs[token_id])), tuple(best))


def token_text(tokenizer: Any, token_id: int) -> str:
    """A token as text, half characters as U+FFFD."""
    text: str = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    return text


def chat_logprobs(tokenizer: Any, found: Sequence[Chances]) -> dict[str, Any]:
    """As chat completions have them."""

    def entry(chance: Chance) -> dict[str, Any]:
        text = token_text(tokenizer, chance.token_id)
        plain = None if "\ufffd" in text else [*text.encode()]
        return {"token": text, "logprob": chance.logprob, "bytes": plain}

    content = [{**entry(each.own), "top_logprobs": [*map(entry, each.best)]} for each in found]
    return {"content": content, "refusal": None}
