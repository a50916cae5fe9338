"""How likely tokens were, by the model's own logits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlite.engine.callbacks import Callbacks
from kvlite.engine.prompt_scores import prompt_logits
from kvlite.memory.oom import OOMPolicy
from kvlite.model.load import LoadedModel


@dataclass(frozen=True)
class Chance:
    """A token and its log probability; None where it follows nothing."""

    token_id: int
    logprob: float | None


@dataclass(frozen=True)
class Chances:
    """Those of a place in a text: of its own token, and of the likeliest, best first."""

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


def prompt_chances(
    model: LoadedModel, token_ids: Sequence[int], top: int, callbacks: Callbacks
) -> Iterator[Chances]:
    """Those of every token of a prompt, each after all before it. Raises Stopped if it was
    cancelled, and OutOfMemory if there is not enough for the hidden states of all tokens and a
    layer."""
    yield Chances(Chance(token_ids[0], None), ())
    if len(token_ids) == 1:
        return

    def scored() -> list[Chances]:
        blocks = prompt_logits(model, token_ids[:-1], callbacks)
        rows = (row for block in blocks for row in block)
        pairs = zip(rows, token_ids[1:], strict=True)
        return [chances(row, token, top) for row, token in pairs]

    yield from OOMPolicy(model.device, model.cards).run(scored, {})


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
