"""Proposals of a model, and how often they are accepted, whatever model makes them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

# How often a proposal is taken to come before that is known, and how many that counts for.
CHANCE, WEIGHT = 0.7, 4.0


class Guesses(ABC):
    """A proposer of what a model finds likeliest.

    Attributes:
        token_ids: those so far.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        self._guessed: list[int] = []
        self._came, self._tried = CHANCE * WEIGHT, WEIGHT

    def push(self, token: int) -> None:
        """Go on with the next token, and count whether it was the one to be expected."""
        self.token_ids.append(token)
        if self._guessed:
            came = self._guessed.pop(0) == token
            self._tried += 1
            self._came += came
            self._guessed = self._guessed if came else []

    def chances(self, count: int) -> list[float]:
        """How likely the first, the first two, ... of `count` proposed tokens all come."""
        chance = self._came / self._tried
        return [chance ** (ahead + 1) for ahead in range(count)]

    @torch.inference_mode()
    def proposed(self, count: int) -> list[int]:
        """The next `count` tokens."""
        try:
            found = self._likeliest(count)
        except BaseException:
            self.release()  # it may be half written
            raise
        self._guessed = [*found]
        return found

    @abstractmethod
    def _likeliest(self, count: int) -> list[int]:
        """The next `count` tokens, or none."""

    @abstractmethod
    def release(self) -> None:
        """Let go of what it holds on the device."""
