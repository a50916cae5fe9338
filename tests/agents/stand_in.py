"""What the model says, by rule; everything else is the real server: template, token ids, grammar,
reading, cache and events."""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoTokenizer

from kvlite.engine.sampling import Sampler
from kvlite.errors import SettingError
from kvlite.server.served_model import Ask, ServedModel, Token

END, RESULT = "<|im_end|>", "<|im_start|>tool\n"


@dataclass
class Asked:
    """A prompt that came.

    Attributes:
        step: how many results of tools it has; None if it is none of the task's.
        tokens, fresh: of the prompt, and those of them that were read.
        first_s, seconds: until the first token of its answer, and until it had ended; None if it
            never did.
    """

    step: int | None
    tokens: int
    fresh: int | None = None
    first_s: float | None = None
    seconds: float | None = None


@dataclass
class StandIn:
    """Says `answers` in turn: each to a prompt with one more result than the one before.

    Attributes:
        mark: what prompts of the task have, and others (for a title, say) have not.
        forbidden: what the grammar did not allow.
    """

    tokenizer: Any
    answers: Sequence[str] = ()
    mark: str = ""
    asked: list[Asked] = field(default_factory=list)
    forbidden: list[str] = field(default_factory=list)

    def begin(self, answers: Sequence[str], mark: str) -> None:
        """Another agent comes."""
        self.answers, self.mark, self.asked, self.forbidden = answers, mark, [], []

    def step(self, ids: Sequence[int]) -> int | None:
        """How many results of tools a prompt has; None if it is none of the task's."""
        prompt = self.tokenizer.decode(ids)
        return prompt.count(RESULT) if self.mark in prompt else None

    def answer(self, ids: Sequence[int]) -> list[int]:
        """The tokens of the answer to a prompt."""
        step = self.step(ids)
        given = step is not None and step < len(self.answers)
        text = self.answers[step] if given and step is not None else "Done."
        return list(self.tokenizer.encode(text + END, add_special_tokens=False))


@contextmanager
def standing_in(model: str) -> Iterator[StandIn]:
    """Let rules say what the model in a folder says."""
    rules = StandIn(AutoTokenizer.from_pretrained(model))

    class Scripted(Sampler):
        left: list[int] | None = None

        def __call__(self, logits: torch.Tensor, seen: list[int]) -> int:
            if self.left is None:
                self.left = rules.answer(seen)
            if not self.left:
                return super().__call__(logits, seen)
            token = self.left.pop(0)
            if self.grammar is not None:
                allowed = self.grammar.masked(torch.zeros_like(logits))[0, token].isfinite()
                if not allowed:
                    text = rules.tokenizer.decode([token, *self.left])
                    rules.forbidden.append(text[:200])
                    raise SettingError(f"the grammar forbids {text[:200]!r}")
            return token

    with patch("kvlite.conversation.turn.Sampler", Scripted), _counting(rules):
        yield rules


@contextmanager
def speaking() -> Iterator[StandIn]:
    """Let the model say what it will; prompts are counted, all as the task's."""
    rules = _Counted(None)
    with _counting(rules):
        yield rules


class _Counted(StandIn):
    def step(self, ids: Sequence[int]) -> int | None:
        return 0


@contextmanager
def _counting(rules: StandIn) -> Iterator[None]:
    asks = ServedModel.answer

    async def answer(self: ServedModel, ask: Ask) -> AsyncGenerator[Token]:
        asked, began = Asked(rules.step(ask.ids), len(ask.ids)), time.monotonic()
        rules.asked.append(asked)
        async for token in asks(self, ask):
            if asked.first_s is None and token.piece is not None:
                asked.first_s = time.monotonic() - began
            if (piece := token.piece) is not None and piece.finish_reason is not None:
                asked.seconds, asked.fresh = time.monotonic() - began, piece.metrics.prompt_tokens
            yield token

    with patch.object(ServedModel, "answer", answer):
        yield
