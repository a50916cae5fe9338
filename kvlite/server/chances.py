"""How likely tokens were, by the model's own logits."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlite.engine.callbacks import Callbacks
from kvlite.engine.prompt_scores import prompt_logits
from kvlite.memory.oom import OOMPolicy
from kvlite.model.gguf.pre_tokenizers import BYTE_CHARACTERS
from kvlite.model.load import LoadedModel

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_BYTE_OF = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}


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


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """A token's bytes, which are part of a character where several tokens make one."""
    text = token_text(tokenizer, token_id)
    written = str(tokenizer.convert_ids_to_tokens(token_id))
    if "\ufffd" not in text:
        lost = written.startswith("\u2581") and not text.startswith(" ")
        return f"{' ' * lost}{text}".encode("utf-8", "replace")
    if (one := _BYTE.fullmatch(written)) is not None:
        return bytes([int(one[1], 16)])
    known = [_BYTE_OF.get(character) for character in written]
    whole = [byte for byte in known if byte is not None]
    return bytes(whole) if len(whole) == len(known) else text.encode()


def token_key(tokenizer: Any, token_id: int) -> str:
    """A token as completions name it: part of a character by its bytes, as OpenAI writes them."""
    data = token_bytes(tokenizer, token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Any, found: Sequence[Chances]) -> list[dict[str, Any]]:
    """As chat completions and responses have them, a token each."""

    def entry(chance: Chance) -> dict[str, Any]:
        text, data = token_text(tokenizer, chance.token_id), token_bytes(tokenizer, chance.token_id)
        return {"token": text, "logprob": chance.logprob, "bytes": [*data]}

    return [{**entry(each.own), "top_logprobs": [*map(entry, each.best)]} for each in found]
