"""A grammar, in llguidance's variant of Lark, while it is written."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from kvlite.model.answers.form import ID, INDEX

# Any text; control tokens are none.
ANY = "/(.|\\n)*/"
INTEGER = "/-?(0|[1-9][0-9]{0,17})/"
NUMBER = "/-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?/"
_SLOTS = {INDEX: "/[0-9]{1,3}/", ID: "/[a-zA-Z0-9]{9}/"}


class Rules:
    """Rules of a grammar whose texts are spelled with a tokenizer's control tokens.

    Attributes:
        lines: the rules so far, a line each.
    """

    def __init__(self, tokenizer: Any, trie: Any) -> None:
        """`trie` is llguidance's, which takes more added tokens for control tokens than have the
        flag."""
        added = tokenizer.added_tokens_decoder.items()
        self._controls = {
            each.content: number
            for number, each in added
            if each.content and trie.is_special_token(number)
        }
        self.lines = list[str]()
        self._named, self._defined = dict[str, str](), set[str]()

    def control(self, text: str) -> int | None:
        """The control token that a text is; None if it is none."""
        return self._controls.get(text)

    @property
    def spelled(self) -> frozenset[str]:
        """The control tokens."""
        return frozenset(self._controls)

    def named(self, rule: str, prefix: str = "r", attributes: str = "") -> str:
        """The name of a rule, which is added if it is not there."""
        key = f"{attributes} {rule}"
        if key not in self._named:
            self._named[key] = name = f"{prefix}{len(self._named)}"
            self.lines.append(f"{name}{attributes}: {rule}")
        return self._named[key]

    def define(self, name: str, rule: str) -> None:
        """Add a rule that is referred to by its own name, unless it is there."""
        if name not in self._defined:
            self._defined.add(name)
            self.lines.append(f"{name}: {rule}")

    def in_order(
        self, items: Sequence[tuple[str, bool]], between: str, end: str, prefix: str
    ) -> str:
        """A rule of some rules in their order, with `between` two of them and `end` behind them;
        with each rule comes whether it has to be there."""
        # What may follow, with and without an item before it, from the last to the first.
        first = later = end
        for item, needed in reversed(items):
            begun, going = f"{item} {later}", f"{between} {item} {later}"
            if not needed:
                begun, going = f"({begun} | {first})", f"({going} | {later})"
            first, later = self.named(begun, prefix), self.named(going, prefix)
        return first

    @staticmethod
    def said(text: str) -> str:
        """A text in Lark that comes from outside, in which nothing is a control token."""
        return json.dumps(text, ensure_ascii=False)

    def text(self, text: str) -> str:
        """A text in Lark, control tokens as such."""
        if not text:
            return ""
        found = [(text.find(each), -len(each), each) for each in (*self._controls, *_SLOTS)]
        found = [each for each in found if each[0] >= 0]
        if not found:
            return self.said(text)
        at, _, spelled = min(found)
        own = _SLOTS.get(spelled) or f"<[{self._controls[spelled]}]>"
        parts = (self.text(text[:at]), own, self.text(text[at + len(spelled) :]))
        return " ".join(filter(None, parts))

    def until(self, end: str) -> str:
        """The name of a rule of any text up to `end`, which is a part of it."""
        end = end.lstrip()
        written = self.text(end)
        if written.startswith("<["):
            return self.named(f"{ANY} {written}", "until")
        mark, rest = self._apart(end)
        until = self.named(f"{ANY} {mark}", "until", "[lazy]")
        return f"{until} {rest}".strip()

    def free(self, but: Iterable[int]) -> str:
        """Any one token but these."""
        left_out = ",".join(map(str, sorted(but)))
        return f"<[^{left_out}]>" if left_out else "<[*]>"

    def choice(self, rules: Iterable[str]) -> str:
        """One of several rules."""
        return f"({' | '.join(dict.fromkeys(rules))})"

    def _apart(self, text: str) -> tuple[str, str]:
        found = [at for each in self._controls if (at := text.find(each)) > 0]
        cut = min(found, default=len(text))
        return self.said(text[:cut]), self.text(text[cut:])
