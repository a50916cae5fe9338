"""Control tokens, which mark the structure of a conversation, and text encoded without any.

A tokenizer turns whatever spells an added token into that token, also in a document. No attribute
tells which added tokens are controls: Phi-3's `<|end|>` and Llama 3's `<|eot_id|>` have no role
name, and Qwen's `<tool_call>` is not even flagged as special.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_HTML = re.compile(
    "</?(a|b|blockquote|br|caption|code|div|em|h[1-6]|hr|i|img|li|ol|p|pre|s|span|strong|sub|sup|"
    "table|tbody|td|tfoot|th|thead|tr|u|ul)>"
)

# Put before text that continues other text, so that no tokenizer adds the space of a beginning.
_BEFORE = "\n"

Span = tuple[int, int]
_Offsets = tuple[list[int], list[Span]]


@dataclass(frozen=True)
class Encoded:
    """Tokens of a text, and where in it each begins; None where the tokenizer would encode all of
    it so, and with slow tokenizers."""

    ids: list[int]
    begins: list[int] | None


class Controls:
    """A tokenizer's control tokens.

    These are all added tokens except ordinary text: white space, and words, single characters and
    HTML tags (Gemma adds many) that are neither flagged as special nor in the chat template.
    Whatever can mark a turn is flagged, in the template, or spelled like none of these; and a token
    taken for a control by mistake is still read, as its characters.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        template = str(getattr(tokenizer, "chat_template", None) or "")
        added = getattr(tokenizer, "added_tokens_decoder", {})
        flagged = {token.content for token in added.values() if token.special}
        self._spelled: dict[int, str] = {
            number: token.content
            for number, token in added.items()
            if not _ordinary(token.content, flagged, template)
        }
        for number in {*getattr(tokenizer, "all_special_ids", [])} - {*self._spelled}:
            self._spelled[number] = tokenizer.convert_ids_to_tokens(number)
        self._unknown = getattr(tokenizer, "unk_token_id", None)
        self._fast = getattr(tokenizer, "is_fast", False)

    def among(self, ids: Sequence[int]) -> list[int]:
        """The control tokens among `ids`, in order."""
        return [token for token in ids if token in self._spelled]

    def outside(
        self, text: str, spans: Sequence[Span], expected: Callable[[], Sequence[int]]
    ) -> Encoded | None:
        """The tokens of a template's text with what was said in it.

        Args:
            spans: where each thing said begins and ends, ascending; controls that have a part of
                one are encoded as the characters that spell them.
            expected: gives the controls of the template's own text, where there are such.

        Returns:
            None if other controls come out, because the template's text and what was said form
            some together, or if the tokenizer does not tell where its tokens come from.
        """
        if not self._fast:
            return None
        ids, offsets = self._encoded([text])[0]
        controls = [at for at, token in enumerate(ids) if token in self._spelled]
        forged = self._touching(controls, offsets, spans)
        if not forged:
            return Encoded(ids, None)
        own = [at for at in controls if at not in forged]
        if [ids[at] for at in own] != [*expected()]:
            return None
        tokens = [(begin, token) for token, (begin, _) in zip(ids, offsets, strict=True)]
        made, at = list[tuple[int, int]](), 0
        for start in sorted(forged):
            if start < at:
                continue  # already encoded with the one before it
            made += tokens[at:start]
            at = next((each for each in own if each > start), len(ids))
            first = offsets[start][0]
            last = offsets[at][0] if at < len(ids) else len(text)
            made += [(first + begin, token) for begin, token in self._spell(text[first:last])]
        made += tokens[at:]
        return Encoded([token for _, token in made], [begin for begin, _ in made])

    @property
    def spelled(self) -> Collection[str]:
        """How they are spelled."""
        return self._spelled.values()

    def _touching(
        self, controls: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span]
    ) -> set[int]:
        """Those of the tokens `controls` that have a part of a span, or one inside them."""
        ends, found = [end for _, end in spans], set[int]()
        for at in controls:
            begin, end = offsets[at]
            nearest = bisect_right(ends, begin)
            if nearest < len(spans) and spans[nearest][0] < end:
                found.add(at)
        return found

    def alone(self, text: str) -> Encoded:
        """The tokens of a text, none of them a control."""
        made = self.outside(text, [(0, len(text))], list)
        if made is not None:
            return made
        pattern = "|".join(map(re.escape, self._spelled.values())) or "$^"
        cuts = [match.start() + 1 for match in re.finditer(pattern, text)]
        pieces = [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]
        ids = [token for piece in pieces for token in self.encoded(piece)]
        return Encoded([token for token in ids if token not in self._spelled], None)

    def _spell(self, text: str) -> list[tuple[int, int]]:
        """Positions and tokens of a text that continues other text, none of them a control: the
        text is cut inside each control until none is left."""
        pieces, made = [(0, text)], list[tuple[int, int]]()
        while pieces:
            encoded = self._going_on([piece for _, piece in pieces])
            cut = list[tuple[int, str]]()
            for (start, piece), (ids, offsets) in zip(pieces, encoded, strict=True):
                cuts = {
                    cut
                    for token, offset in zip(ids, offsets, strict=True)
                    if self._is_spelled(token, piece[slice(*offset)])
                    for cut in self._inside(piece, token, *offset)
                }
                if not cuts:
                    begins = (start + begin for begin, _ in offsets)
                    made += zip(begins, ids, strict=True)
                elif len(piece) == 1:
                    made += [(start, token) for token in self.encoded("\ufffd")]
                else:
                    edges = sorted({0, *cuts, len(piece)})
                    cut += [(start + a, piece[a:b]) for a, b in pairwise(edges)]
            pieces = cut
        return sorted(made, key=lambda each: each[0])

    def _inside(self, text: str, token: int, begin: int, end: int) -> tuple[int, ...]:
        """Where to cut a control in a text: after its first character, or in the middle where white
        space or normalization make it longer or shorter than its spelling."""
        spelled = self._spelled[token]
        found = text.find(spelled, begin, end)
        if found >= 0 and len(spelled) > 1:
            return (found + 1,)
        return ((begin + end) // 2,) if end - begin > 1 else (begin, end)

    def _is_spelled(self, token: int, text: str) -> bool:
        """Whether a token of a text is a control; the unknown token only if it is spelled out."""
        spelled = self._spelled.get(token)
        return spelled is not None and (token != self._unknown or spelled in text)

    def _going_on(self, texts: Sequence[str]) -> list[_Offsets]:
        """Tokens of texts, without the space that some tokenizers put at a beginning."""
        before, width = self.encoded(_BEFORE), len(_BEFORE)
        made = list[_Offsets]()
        for text, (ids, offsets) in zip(
            texts, self._encoded([_BEFORE + text for text in texts]), strict=True
        ):
            rest = offsets[len(before) :]
            if ids[: len(before)] == before and all(begin >= width for begin, _ in rest[:1]):
                shifted = [(begin - width, end - width) for begin, end in rest]
                made.append((ids[len(before) :], shifted))
            else:
                made += self._encoded([text])
        return made

    def _encoded(self, texts: Sequence[str]) -> list[_Offsets]:
        made = self.tokenizer([*texts], add_special_tokens=False, return_offsets_mapping=True)
        return [*zip(made["input_ids"], made["offset_mapping"], strict=True)]

    def encoded(self, text: str) -> list[int]:
        """The tokens of a text, whichever they are."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


def _ordinary(spelled: str, flagged: set[str], template: str) -> bool:
    words = spelled.replace("\u2581", " ").split()
    if not words or spelled in flagged or spelled in template:
        return not words
    if len(spelled) == 1:
        return True
    tag = _HTML.fullmatch(spelled)
    if tag is not None:  # Phi-3's </s> is none: its <s> is flagged
        return flagged.isdisjoint((f"<{tag[1]}>", f"</{tag[1]}>"))
    return all(map(str.isalnum, words))
