"""Log probabilities of the tokens that an answer's text is made of, as they come."""

import codecs

from kvlite.model.load import LoadedModel
from kvlite.server.chances import Chances, token_bytes
from kvlite.server.served_model import Token


class ShownChances:
    """Those of one answer. Each comes with the text that its token begins, so that the end of an
    answer and what a stop string took away have none."""

    def __init__(self, model: LoadedModel) -> None:
        self._model, self._held = model, list[tuple[int, Chances]]()
        self._begin = self._shown = 0

    def push(self, token: Token, reason: str | None) -> list[Chances]:
        """Those that are certain with one more token; `reason` is why the answer ended there."""
        piece, ends = token.piece, self._model.stop_ids
        assert piece is not None
        self._shown += len((piece.raw or piece.text).encode("utf-8", "replace"))
        if token.chances is not None and piece.token_id is not None and piece.token_id not in ends:
            self._held.append((self._begin, token.chances))
            self._begin += self._size(piece.token_id)
        was_cut = reason == "stop" and piece.token_id not in ends
        every = reason is not None and not was_cut
        ready = [each for begin, each in self._held if every or begin < self._shown]
        self._held = self._held[len(ready) :]
        return ready

    def _size(self, token_id: int) -> int:
        """Bytes of a token in the text, which leaves most special ones out."""
        tokenizer = self._model.tokenizer
        if token_id in tokenizer.all_special_ids and token_id not in self._model.spelled:
            return 0
        return len(token_bytes(tokenizer, token_id))


class Offsets:
    """Where tokens begin in a text: those within a character, where it does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def next(self, data: bytes) -> int:
        """Where the next token begins, of these bytes."""
        begin = self._at
        self._at += len(self._decoder.decode(data))
        return begin
