"""A grammar as a mask on logits: an answer can only become what the grammar allows.

llguidance walks the vocabulary's trie at every token. Nothing is compiled ahead, so a schema costs
milliseconds, whatever the vocabulary.
"""

import torch
from torch import Tensor

from kvlite.errors import SettingError
from kvlite.model.grammar import Vocabulary, in_a_line, require_grammar
from kvlite.model.grammar_trial import limits
from kvlite.model.in_thread import with_deep_stack


class Grammar:
    """What one answer may go on with.

    Attributes:
        ended: nothing may follow any more.
    """

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        """By a setting's text; errors are those of `require_grammar`."""
        from llguidance import LLMatcher

        self._size, grammar = vocabulary.size, require_grammar(text)
        self._matcher = with_deep_stack(
            lambda: LLMatcher(vocabulary.trie, grammar, log_level=0, limits=limits())
        )
        self._require_going()

    @property
    def ended(self) -> bool:
        """Whether nothing may follow but the end."""
        return self._matcher.is_stopped()

    @property
    def may_end(self) -> bool:
        """Whether the answer is whole as it is."""
        return self._matcher.is_accepting()

    def masked(self, logits: Tensor) -> Tensor:
        """Logits `(1, vocab)` with minus infinity for all tokens that may not come next.

        Raises:
            SettingError: what may come next is too much to compute.
        """
        # A byte for each token, 0 where it may not come.
        mask = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        self._require_going()
        forbidden = mask[: self._size].to(logits.device) == 0
        return logits.masked_fill(forbidden, float("-inf"))

    def take(self, token_id: int) -> None:
        """A token has come."""
        self._matcher.consume_token(token_id)
        self._require_going()

    def _require_going(self) -> None:
        if self._matcher.is_error():
            said = in_a_line(self._matcher.get_error())
            raise SettingError(f"--schema cannot be followed ({said}): give a simpler one")
