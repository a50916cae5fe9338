"""From logits to the next token, with transformers' own logits processors."""

from collections import Counter
from typing import cast

import torch
from torch import Tensor

from kvlite.engine.grammar import Grammar
from kvlite.methods.engine_config import EngineConfig

# Settings that do not change what is read: an answer can be drawn again with others.
DRAWING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "speculate",
    "schema",
    "reasoning_budget",
)

# Below it logits overflow, and every draw would be the likeliest token.
COLDEST = 1e-3


class Penalties:
    """Takes from the logits of tokens that an answer has already, as OpenAI's API defines it.

    Attributes:
        counts: how often the answer has each token.
    """

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency
        self.counts = Counter[int]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `(1, vocab)` after the penalties."""
        tokens = torch.tensor([*self.counts], dtype=torch.int64, device=scores.device)
        times = torch.tensor([*self.counts.values()], dtype=scores.dtype, device=scores.device)
        return scores.index_add(1, tokens, -(self.presence + self.frequency * times)[None])


class Sampler:
    """Draws tokens as the settings say, among those that the grammar allows if there is one; greedy
    at temperature 0.

    Attributes:
        on_host: whether a draw depends on tokens that only the host knows: by a grammar, or by
            how often they came.
    """

    def __init__(
        self, config: EngineConfig, device: torch.device, grammar: Grammar | None = None
    ) -> None:
        from transformers import (
            LogitsProcessorList,
            MinPLogitsWarper,
            RepetitionPenaltyLogitsProcessor,
            SequenceBiasLogitsProcessor,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        settings, biases = config.settings, config.logit_bias
        self.grammar = grammar
        self.greedy = settings.temperature < COLDEST
        self.penalized = settings.repetition_penalty != 1
        self.processors = LogitsProcessorList()
        if self.penalized:
            self.processors.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
        self.penalties = Penalties(settings.presence_penalty, settings.frequency_penalty)
        counts = bool(settings.presence_penalty or settings.frequency_penalty)
        self.on_host = grammar is not None or counts
        if counts:
            self.processors.append(self.penalties)
        if biases:
            pairs: list[list[list[int] | float]] = [[[each], biases[each]] for each in biases]
            self.processors.append(SequenceBiasLogitsProcessor(pairs))
        if not self.greedy:
            self.processors.append(TemperatureLogitsWarper(settings.temperature))
            if settings.top_k:
                self.processors.append(TopKLogitsWarper(settings.top_k))
            if settings.top_p < 1:
                self.processors.append(TopPLogitsWarper(settings.top_p))
            if settings.min_p:
                self.processors.append(MinPLogitsWarper(settings.min_p))
        self.generator = torch.Generator(device)
        if settings.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(settings.seed)

    def __call__(self, logits: Tensor, seen: list[int]) -> int:
        """The next token of one sequence.

        Args:
            logits: `(1, vocab)` float32.
            seen: every token before it; looked at only where repetition is penalized.
        """
        if self.grammar is not None:
            logits = self.grammar.masked(logits)
        context = torch.tensor([seen if self.penalized else []], device=logits.device)
        before = self.generator.get_state()
        try:
            return int(self.draw(logits, context.long()))
        except BaseException:
            self.generator.set_state(before)  # a draw that fails is none
            raise

    def draw(self, logits: Tensor, context: Tensor) -> Tensor:
        """The next token of one sequence, `(1,)` int64 on the device; nobody waits for it.

        Args:
            logits: `(1, vocab)` float32.
            context: `(1, n)` int64, tokens that were seen, in any order and however often; looked
                at only where repetition is penalized.
        """
        scores: Tensor = self.processors(cast(torch.LongTensor, context), logits)
        if self.greedy:
            return scores.argmax(-1)
        chances = scores.softmax(-1)
        # As torch.multinomial draws, but for its checks: these wait for the device.
        times = torch.empty_like(chances).exponential_(generator=self.generator)
        return (chances / times).argmax(-1)

    def take(self, token_id: int) -> bool:
        """A token has come; whether the answer has to end with it."""
        self.penalties.counts[token_id] += 1
        if self.grammar is None:
            return False
        self.grammar.take(token_id)
        return self.grammar.ended
