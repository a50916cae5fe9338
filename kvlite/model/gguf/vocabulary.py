"""The vocabulary in a GGUF file's header, checked before anything is made of it."""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import isnan
from pathlib import Path
from typing import Any

from kvlite.errors import ModelError
from kvlite.model.gguf.header import Header

MODELS = ("llama", "gpt2", "gemma4")
_PREFIX = "tokenizer.ggml."
# Roles that decide what is read or where an answer ends; llama.cpp goes on without the others.
_ANSWERED = ("bos", "eos", "eot", "eom", "unknown")
# Ids that stand for "none" in files.
_NONE = (-1, 0xFFFFFFFF)


class Kind(IntEnum):
    """GGUF's types of tokens."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_MARKS = (Kind.CONTROL, Kind.UNKNOWN)
# Tokens that end an answer whatever the header says, and are controls whatever their type.
ENDS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
        "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
        "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~[",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)  # fmt: skip
_DEFAULTS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "gemma4": {},
}


@dataclass(frozen=True)
class Vocabulary:
    """The tokens and what a file says of them.

    Attributes:
        path: the file, for errors.
        model: llama, gpt2 or gemma4.
        tokens: by id; each once.
        kinds: of each token.
        scores: of each token, where the file has them.
        merges: pairs of tokens, the first ones first.
        roles: ids by role: bos, eos, unknown, padding, eot and so on.
        more_ends: ids that end an answer, by the header.
    """

    path: Path
    model: str
    tokens: list[str]
    kinds: list[int]
    scores: list[float] | None
    merges: list[str] | None
    roles: dict[str, int]
    more_ends: tuple[int, ...] = ()

    @classmethod
    def read(cls, header: Header) -> "Vocabulary":
        """The vocabulary of a file. Raises ModelError if it is missing, contradicts itself or is of
        a kind that is not read here; OSError if the file cannot be read."""
        model = text_of(header, f"{_PREFIX}model")
        if model is None:
            raise unreadable(header, f"{_PREFIX}model", "is missing")
        if model == "llama" and header.architecture == "gemma4" and _has(header, "merges"):
            model = "gemma4"  # as Ollama writes it
        if model not in MODELS:
            raise ModelError(
                f"{header.paths[0]} has a tokenizer of the kind {model[:40]!r} "
                f"({_PREFIX}model), which kvlite does not have: take a model with one of the kinds "
                f"{', '.join(MODELS)}"
            )
        tokens = _tokens(header)
        return cls(
            header.paths[0],
            model,
            tokens,
            _kinds(header, len(tokens)),
            _scores(header, len(tokens)),
            _list(header, "merges", str),
            _roles(header, len(tokens)),
            _more_ends(header, len(tokens)),
        )

    def role(self, name: str) -> int | None:
        """The id of a role, such as bos. One that the file does not name is llama.cpp's default if
        that token can have a role at all."""
        found = self.roles.get(name)
        if found is not None:
            return found
        default = _DEFAULTS[self.model].get(name)
        return default if default in self.controls else None

    def of_kind(self, kind: Kind) -> list[str]:
        """The tokens of a type."""
        pairs = zip(self.tokens, self.kinds, strict=True)
        return [token for token, own in pairs if own == kind]

    @cached_property
    def controls(self) -> frozenset[int]:
        """The tokens that mark structure, and are no text."""
        marks = {number for role in ("bos", "eos") if (number := self.roles.get(role)) is not None}
        pairs = enumerate(zip(self.tokens, self.kinds, strict=True))
        return frozenset(marks).union(
            number for number, (token, kind) in pairs if kind in _MARKS or token in ENDS
        )


def unreadable(header: Header, key: str, why: str) -> ModelError:
    """The error for a field that cannot be used."""
    return ModelError(
        f"the tokenizer in {header.paths[0]} cannot be used, as {key} {why}: get the file again, "
        "or another file of this model"
    )


def text_of(header: Header, key: str) -> str | None:
    """A text of the metadata; None if it is missing. Raises ModelError if it is no text."""
    found = header.fields.get(key)
    if found is not None and not isinstance(found, str):
        raise unreadable(header, key, "is no text")
    return found


def flag_of(header: Header, key: str, default: bool) -> bool:
    """A yes or no of the metadata. Raises ModelError if it is neither."""
    found = header.fields.get(f"{_PREFIX}{key}", default)
    if not isinstance(found, bool):
        raise unreadable(header, f"{_PREFIX}{key}", "is neither true nor false")
    return found


def _has(header: Header, key: str) -> bool:
    return f"{_PREFIX}{key}" in header.fields


def _list(header: Header, key: str, *kinds: type, count: int | None = None) -> list[Any] | None:
    if not _has(header, key):
        return None
    values = header.values(f"{_PREFIX}{key}")
    if values is None or not {*map(type, values)} <= {*kinds}:
        names = {str: "texts", int: "whole numbers", float: "numbers"}
        raise unreadable(header, f"{_PREFIX}{key}", f"is no list of {names[kinds[0]]}")
    if count not in (None, len(values)):
        many = f"has {len(values):,} values, and there are {count:,} tokens"
        raise unreadable(header, f"{_PREFIX}{key}", many)
    return values


def _tokens(header: Header) -> list[str]:
    tokens = _list(header, "tokens", str)
    if not tokens:
        raise unreadable(header, f"{_PREFIX}tokens", "is empty" if tokens == [] else "is missing")
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        token, first = next((each, at) for at, each in enumerate(tokens) if ids[each] != at)
        twice = f"has {token[:40]!r} twice, as {first:,} and {ids[token]:,}"
        raise unreadable(header, f"{_PREFIX}tokens", twice)
    return tokens


def _kinds(header: Header, count: int) -> list[int]:
    kinds = _list(header, "token_type", int, count=count)
    if strange := {*(kinds or ())} - {*Kind}:
        raise unreadable(header, f"{_PREFIX}token_type", f"has the unknown type {min(strange)}")
    return [Kind.NORMAL] * count if kinds is None else kinds


def _scores(header: Header, count: int) -> list[float] | None:
    scores = _list(header, "scores", float, int, count=count)
    if any(map(isnan, scores or ())):
        raise unreadable(header, f"{_PREFIX}scores", "has a value that is not a number")
    return scores


def _roles(header: Header, count: int) -> dict[str, int]:
    found = dict[str, int]()
    for key, number in header.fields.items():
        if not key.startswith(_PREFIX) or not key.endswith("_token_id"):
            continue
        if type(number) is not int:
            raise unreadable(header, key, "is no whole number")
        role = key.removeprefix(_PREFIX).removesuffix("_token_id")
        if 0 <= number < count:
            found[role] = number
        elif role in _ANSWERED and number not in _NONE:
            raise unreadable(header, key, f"is {number:,}, and there are {count:,} tokens")
    return found


def _more_ends(header: Header, count: int) -> tuple[int, ...]:
    ids = _list(header, "eos_token_ids", int) or ()
    if beyond := [number for number in ids if not 0 <= number < count]:
        raise unreadable(
            header, f"{_PREFIX}eos_token_ids", f"has {beyond[0]:,}, and there are {count:,} tokens"
        )
    return (*ids,)
