"""Telling a file's name, which may be misspelt, from a question."""

import re


def may_be_file(word: str) -> bool:
    """Whether a word is written like a file's name, or is one word of ASCII and no question."""
    return is_written_like_a_file(word) or re.fullmatch(r"[!-~]*[^\s?!]", word, re.A) is not None


def is_written_like_a_file(word: str) -> bool:
    """Whether a word has a suffix or a folder."""
    inside = re.fullmatch(r"\S+\.[A-Za-z0-9]{1,5}|\S*[\\/][^\s?]*", word)
    return inside is not None or re.match(r"(~|\.{1,2})?[\\/][^?]*$", word) is not None
