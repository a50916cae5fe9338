"""Prompt lookup: tokens that followed the same words before are proposed again.

Saxena, "Prompt Lookup Decoding" (2023), with the chains of LZ77 compressors: the longest match is
found without going through the text again, and how often its next token came is counted for all
lengths of a match, whether or not anything was done with it.
"""

from collections.abc import Iterable

# Longer matches are not told apart.
LONGEST = 8
# Earlier places that are compared, the latest first.
PLACES = 32
# How often the token after a match of 0, 1, ... tokens is taken to come, before it is known, and
# how many observations that counts for.
CHANCES = (0.1, 0.2, 0.4, 0.45, 0.5, 0.7, 0.7, 0.8, 0.9)
WEIGHT = 4.0


class PromptLookup:
    """Proposes tokens to come from those so far.

    Attributes:
        token_ids: all so far.
        length: how many of the last ones stood before in the same order, up to `LONGEST`. If none
            did, it goes on as after the token before the last one, which numbered lines make right.
    """

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self.token_ids: list[int] = []
        self.length = 0
        self._follows = 0  # where the token after the match is; 0 if there is none
        self._last: dict[int, int] = {}  # where each token was last,
        self._last_pair: dict[int, int] = {}  # and each pair
        self._before = self._before_last = -1  # where the last two were before; -1 if nowhere
        self._pair_before: list[int] = []  # and each pair
        self._came = [chance * WEIGHT for chance in CHANCES]
        self._tried = [WEIGHT] * len(CHANCES)
        for token in token_ids:
            self._add(token)
        self._match()

    def push(self, token: int) -> None:
        """Go on with the next token, and count whether it was the one to be expected."""
        if self._follows:
            self._tried[self.length] += 1
            self._came[self.length] += self.token_ids[self._follows] == token
        self._add(token)
        self._match()

    def chances(self, count: int) -> list[float]:
        """How likely the first, the first two, ... of `count` proposed tokens all come; none where
        nothing is proposed."""
        if not self._follows:
            return []
        chances, chance = [], 1.0
        for length in range(self.length, self.length + count):
            at = min(length, LONGEST)
            chance *= self._came[at] / self._tried[at]
            chances.append(chance)
        return chances

    def proposed(self, count: int) -> list[int]:
        """The next `count` tokens, if there is a match and it goes on as after that: into itself,
        where that is near."""
        if not self._follows:
            return []
        found = self.token_ids[self._follows : self._follows + count]
        while len(found) < count:
            found.append(found[len(found) - (len(self.token_ids) - self._follows)])
        return found

    def release(self) -> None:
        """Nothing is held on the device."""

    def _add(self, token: int) -> None:
        at = len(self.token_ids)
        pair = token << 32 | (self.token_ids[-1] if at else 0)
        self.token_ids.append(token)
        self._before_last, self._before = self._before, self._last.get(token, -1)
        self._last[token] = at
        self._pair_before.append(self._last_pair.get(pair, -1))
        self._last_pair[pair] = at

    def _match(self) -> None:
        """Find the longest match of the last tokens, of equally long ones the latest."""
        tokens, end = self.token_ids, len(self.token_ids) - 1
        self.length, self._follows = int(self._before >= 0), self._before + 1
        if not self.length and self._before_last >= 0:
            self._follows = self._before_last + 2
        place = self._pair_before[end] if tokens else -1
        for _ in range(PLACES):
            if place < 1 or self.length == LONGEST:
                break
            length, most = 2, min(LONGEST, place + 1)
            while length < most and tokens[place - length] == tokens[end - length]:
                length += 1
            if length > self.length:
                self.length, self._follows = length, place + 1
            place = self._pair_before[place]
