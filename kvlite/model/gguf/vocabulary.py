"""The vocabulary in a GGUF file's header, checked before anything is made of it.

Source: llama.cpp's llama-vocab.cpp, for what roles mean and which tokens end an answer.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import isnan
from typing import Any

from kvlite.errors import ModelError
from kvlite.model.gguf.header import Header

MODELS = ("llama", "gpt2", "gemma4")
PREFIX = "tokenizer.ggml."
# Roles that decide what is read or where an answer ends; llama.cpp goes on without the others.
_ENDING = ("eos", "eot", "eom")
_ANSWERED = ("bos", "unknown", *_ENDING)
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


# Tokens that fill up or separate files in code, and are never part of an answer, by their roles.
_BETWEEN_FILES = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_HARMONY = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


@dataclass(frozen=True)
class Vocabulary:
    """The tokens and what a file says of them.

    Attributes:
        header: of the file.
        model: llama, gpt2 or gemma4.
        tokens: by id; each once.
        kinds: of each token.
        scores: of each token, where the file has them.
        merges: pairs of tokens, the first ones first.
        roles: ids by role: bos, eos, unknown, padding, eot and so on.
        more_ends: ids that end an answer, by the header.
    """

    header: Header
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
        model, merges = text_of(header, f"{PREFIX}model"), _list(header, "merges", str)
        if model is None:
            raise unreadable(header, f"{PREFIX}model", "is missing")
        if model == "llama" and header.architecture == "gemma4" and merges is not None:
            model = "gemma4"  # as Ollama writes it
        if model not in MODELS:
            raise ModelError(
                f"{header.paths[0]} has a tokenizer of the kind {model[:40]!r} "
                f"({PREFIX}model), which kvlite does not have: take a model with one of the kinds "
                f"{', '.join(MODELS)}"
            )
        tokens = _tokens(header)
        count = len(tokens)
        kinds = _list(header, "token_type", int, count=count) or [Kind.NORMAL] * count
        if strange := {*kinds} - {*Kind}:
            raise unreadable(header, f"{PREFIX}token_type", f"has the unknown type {min(strange)}")
        scores = _list(header, "scores", float, int, count=count)
        if any(map(isnan, scores or ())):
            raise unreadable(header, f"{PREFIX}scores", "has a value that is not a number")
        ends = _list(header, "eos_token_ids", int) or ()  # as Ollama writes it
        if beyond := [number for number in ends if not 0 <= number < count]:
            why = f"has {beyond[0]:,}, and there are {count:,} tokens"
            raise unreadable(header, f"{PREFIX}eos_token_ids", why)
        return cls(header, model, tokens, kinds, scores, merges, _roles(header, count), (*ends,))

    def role(self, name: str) -> int | None:
        """The id of a role, such as bos. One that the file does not name is llama.cpp's default if
        that token can have a role at all."""
        found = self.roles.get(name)
        if found is not None:
            return found
        default = _DEFAULTS[self.model].get(name)
        return default if default in self.controls else None

    @cached_property
    def controls(self) -> frozenset[int]:
        """The tokens that mark structure, and are no text."""
        marks = {number for role in ("bos", "eos") if (number := self.roles.get(role)) is not None}
        pairs = enumerate(zip(self.tokens, self.kinds, strict=True))
        return frozenset(marks).union(
            number for number, (token, kind) in pairs if kind in _MARKS or token in ENDS
        )

    @property
    def ends(self) -> list[int]:
        """The tokens that end an answer, in order, as llama.cpp finds them: by what they are called
        where the header is silent or names one of several."""
        ids = {token: number for number, token in enumerate(self.tokens)}
        found = {ids[token] for token in ENDS if token in ids} | {*self.more_ends}
        for role, names in _BETWEEN_FILES.items():
            named = (ids[name] for name in names if name in ids)
            found.add(self.roles.get(role, next(named, -1)))
        found |= {number for role in _ENDING if (number := self.role(role)) is not None}
        # gpt-oss and Solar end each part of an answer so, and the answer with another token.
        if any(all(each in ids for each in pair) for pair in _HARMONY):
            found.discard(ids.get("<|end|>", -1))
        # Gemma 4 has it as a word.
        if "<|tool_response>" in ids:
            found.discard(ids.get("</s>", -1))
        return sorted(found - {-1})


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
    found = header.fields.get(f"{PREFIX}{key}", default)
    if not isinstance(found, bool):
        raise unreadable(header, f"{PREFIX}{key}", "is neither true nor false")
    return found


def _list(header: Header, name: str, *kinds: type, count: int | None = None) -> list[Any] | None:
    key = f"{PREFIX}{name}"
    if key not in header.fields:
        return None
    values = header.values(key)
    if values is None or not {*map(type, values)} <= {*kinds}:
        names = {str: "texts", int: "whole numbers", float: "numbers"}
        raise unreadable(header, key, f"is no list of {names[kinds[0]]}")
    if count not in (None, len(values)):
        raise unreadable(header, key, f"has {len(values):,} values, and there are {count:,} tokens")
    return values


def _tokens(header: Header) -> list[str]:
    tokens = _list(header, "tokens", str)
    if not tokens:
        raise unreadable(header, f"{PREFIX}tokens", "is empty" if tokens == [] else "is missing")
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        token, first = next((each, at) for at, each in enumerate(tokens) if ids[each] != at)
        twice = f"has {token[:40]!r} twice, as {first:,} and {ids[token]:,}"
        raise unreadable(header, f"{PREFIX}tokens", twice)
    return tokens


def _roles(header: Header, count: int) -> dict[str, int]:
    found = dict[str, int]()
    for key, number in header.fields.items():
        if not key.startswith(PREFIX) or not key.endswith("_token_id"):
            continue
        if type(number) is not int:
            raise unreadable(header, key, "is no whole number")
        role = key.removeprefix(PREFIX).removesuffix("_token_id")
        if 0 <= number < count:
            found[role] = number
        elif role in _ANSWERED and number not in _NONE:
            raise unreadable(header, key, f"is {number:,}, and there are {count:,} tokens")
    return found
