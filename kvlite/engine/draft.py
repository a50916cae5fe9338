"""A draft model: what a smaller model of the same tokens would say next.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (2023).
Proposals are its most likely tokens. Every token is drawn from the large model's own logits,
whatever was proposed, so the distribution of answers does not change.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlite.cache import KVCache
from kvlite.engine.decode import decode_step
from kvlite.engine.guesses import Guesses
from kvlite.engine.mtp import MtpGuesses
from kvlite.engine.prefill import prefill
from kvlite.engine.prompt_lookup import PromptLookup
from kvlite.engine.speculate import WIDEST, Ahead, Proposer, room_ahead
from kvlite.methods import parse_method
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.load import LoadedModel

# The last tokens that a draft model reads.
READS = 2048


class Draft(Guesses):
    """Proposes what a draft model would say.

    Attributes:
        token_ids: the last ones so far.
    """

    def __init__(
        self, model: LoadedModel, token_ids: Sequence[int], longest: int, vocab: int
    ) -> None:
        """For an answer planned to have `longest` tokens, which are read when tokens are wanted.

        Args:
            vocab: tokens that the large model knows.
        """
        super().__init__(token_ids[-reads(model.shape.max_context, longest) :])
        self.model, self.longest, self.vocab = model, longest, vocab
        self.policies = layer_policies(
            parse_method("full"), model.shape, READS, max(1, len(self.token_ids))
        )
        self._cache: KVCache | None = None

    def _likeliest(self, count: int) -> list[int]:
        logits, cache, found = *self._read(), list[int]()
        marks, seen = [layer.mark() for layer in cache.layers], cache.seen
        states = {**cache.states}
        while len(found) < count:
            token = logits[:, : self.vocab].argmax(-1)
            found.append(int(token))
            if len(found) < count:
                logits = decode_step(self.model, cache, token, self.policies)
        for layer, mark in zip(cache.layers, marks, strict=True):
            layer.rewind(mark)
        cache.seen, cache.states = seen, states
        return found

    def release(self) -> None:
        """Let go of the cache."""
        self._cache = None

    def _read(self) -> tuple[Tensor, KVCache]:
        """Read what is new of the tokens so far. Returns logits of the next, and the cache."""
        model, policies = self.model, self.policies
        if len(self.token_ids) + WIDEST > model.shape.max_context:  # it begins anew
            self.token_ids = self.token_ids[-reads(model.shape.max_context, self.longest) :]
            self._cache = None
        if self._cache is None:
            self._cache, ids = model.empty_cache(), torch.tensor([self.token_ids])
            room = self.longest + WIDEST
            return prefill(model, self._cache, ids, policies, reserve=room), self._cache
        cache, logits = self._cache, None
        new = self.token_ids[cache.seen :]
        if 1 < len(new) <= room_ahead(cache, policies):
            ahead = Ahead(model, cache, new)
            for token in new:
                logits = ahead.enter(token)
        else:
            for token in new:
                ids = torch.tensor([token], device=model.device)
                logits = decode_step(model, cache, ids, policies)
        assert logits is not None
        return logits, cache


def proposers(
    model: LoadedModel, cache: KVCache, token_ids: Sequence[int], longest: int, looks_up: bool
) -> list[Proposer]:
    """What proposes tokens of an answer to `token_ids`, planned to have `longest` tokens.

    Args:
        cache: which was read into.
        looks_up: whether they are looked up in what was read, too.
    """
    found = list[Proposer]([PromptLookup(token_ids)] if looks_up else [])
    if model.mtp is not None and cache.hidden is not None:
        found.append(MtpGuesses(model, cache.hidden, token_ids))
    if model.draft is not None:
        found.append(Draft(model.draft, token_ids, longest, model.shape.vocab))
    return found


def reads(max_context: int, longest: int) -> int:
    """How many of the last tokens a draft model reads before an answer."""
    return max(1, min(READS, max_context - longest - WIDEST))
