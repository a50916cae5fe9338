"""A tokenizer in a GGUF file's header, as the files that transformers reads.

Source: llama.cpp's llama-vocab.cpp, for what the fields mean. SentencePiece joins the two
neighbours whose joint piece has the best score; `tokenizers` joins those that come first in a list
of merges. So the list has all pairs of pieces that make a piece, those of the best one first.
"""

import json
import re
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any

from kvlite.config.atomic_file import replaced
from kvlite.errors import ModelError
from kvlite.model.gguf.header import Header
from kvlite.model.gguf.pre_tokenizers import (
    BYTE_CHARACTERS,
    DEFAULT,
    PRE_TOKENIZERS,
    PreTokenizer,
)
from kvlite.model.gguf.stop_tokens import stop_ids
from kvlite.model.gguf.vocabulary import Kind, Vocabulary, flag_of, text_of, unreadable

_MODEL, _PRE, _TEMPLATE = "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template"
_MERGES, _SCORES = "tokenizer.ggml.merges", "tokenizer.ggml.scores"
_SPACE = "\u2581"
# Pieces that are looked at in all their halves: real ones have 16 characters, or 64 spaces.
_LONGEST_PIECE, _MOST_CHARACTERS = 1 << 10, 1 << 24
_MERGED = (Kind.UNDEFINED, Kind.NORMAL)
# Users' tokens that the byte-level decoder must be told of: DeepSeek has one.
_MOST_ESCAPED = 64
# What converters write for spaces in tokens that are no longer merged.
_AS_TEXT = str.maketrans({_SPACE: " ", "\u0120": " ", "\u010a": "\n"})
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# Phi-3's special tokens take the white space after them, but for these.
_PHI3, _KEEP_SPACES = ("phi-3", "phi3"), ("<unk>", "<s>", "<|endoftext|>")
# The template that transformers takes where there are tools.
_WITH_TOOLS = "tool_use"
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def write_tokenizer(header: Header, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, generation_config.json (with what ends an
    answer) and the chat templates, of which AutoTokenizer makes the tokenizer in the header.

    Raises:
        ModelError: the tokenizer is damaged, or of a kind that is not read here.
        OSError: the file cannot be read, or the folder not written.
    """
    vocabulary = Vocabulary.read(header)
    pre = _pre_tokenizer(header, vocabulary)
    # The config comes last: it says that the others are there.
    added = _added_tokens(header, vocabulary)
    files = {"tokenizer.json": _tokenizer_json(header, vocabulary, pre, added)}
    files |= _templates(header)
    files["generation_config.json"] = json.dumps(_generation(vocabulary), indent=1)
    config = _config(vocabulary, added)
    files["tokenizer_config.json"] = json.dumps(config, indent=1)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as file:
            file.write(text.encode())


def _pre_tokenizer(header: Header, vocabulary: Vocabulary) -> PreTokenizer | None:
    """How texts are cut before BPE; None for SentencePiece, which does not cut them."""
    if vocabulary.model == "llama":
        return None
    if vocabulary.model == "gemma4":
        return PRE_TOKENIZERS["gemma4"]
    name = text_of(header, _PRE) or DEFAULT
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{header.paths[0]} has a tokenizer that cuts text by rules called {name[:40]!r} "
            f"({_PRE}), which kvlite does not know: use a newer kvlite, or another model"
        )
    return PRE_TOKENIZERS[name]


def _tokenizer_json(
    header: Header, vocabulary: Vocabulary, pre: PreTokenizer | None, added: list[dict[str, Any]]
) -> str:
    """The file tokenizer.json, written out by parts, as most of it are tokens and merges."""
    quoted = {token: encode_basestring(token) for token in vocabulary.tokens}
    if pre is None:
        merges = _pairs_of_pieces(header, vocabulary, quoted)
        rules = _sentencepiece(flag_of(header, "add_space_prefix", True))
    else:
        merges = _stored_merges(header, vocabulary, quoted)
        rules = _raw(pre) if pre.raw else _byte_level(pre, vocabulary)
    raw, unknown = pre is None or pre.raw, vocabulary.role("unknown")
    bytes_ = all(f"<0x{byte:02X}>" in quoted for byte in range(256))
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": vocabulary.tokens[unknown] if raw and unknown is not None else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": raw,
        "byte_fallback": raw and bytes_,
        "ignore_merges": pre is not None and pre.ignore_merges,
    }
    frame = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **rules,
        "post_processor": _ends(header, vocabulary, pre),
    }
    entries = ",\n".join(f"{each}:{number}" for number, each in enumerate(quoted.values()))
    pairs = ",\n".join(merges)
    head = json.dumps(frame, ensure_ascii=False)[:-1]
    begin = json.dumps(model, ensure_ascii=False)[:-1]
    return f'{head},\n"model":{begin},\n"vocab":{{\n{entries}}},\n"merges":[\n{pairs}]}}}}\n'


def _sentencepiece(prefix: bool) -> dict[str, Any]:
    """Rules of text in pieces; with a space before what follows nothing, or a special token."""
    normalizers = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    normalizers.append(_replace(" ", _SPACE))
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": _pieces_decoder(prefix),
    }


def _raw(pre: PreTokenizer) -> dict[str, Any]:
    """Rules of BPE over characters."""
    return {
        "normalizer": _replace(" ", _SPACE),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _splits(pre)},
        "decoder": _pieces_decoder(False),
    }


def _byte_level(pre: PreTokenizer, vocabulary: Vocabulary) -> dict[str, Any]:
    """Rules of BPE over bytes."""
    level: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level["use_regex"] = False
    # The decoder would take a user's token such as \u00fc for the byte that is written so.
    texts = [token for token in vocabulary.of_kind(Kind.USER_DEFINED) if _reads_as_bytes(token)]
    escaped = [
        {"type": "Replace", "pattern": {"Regex": rf"\A{re.escape(text)}\z"}, "content": written}
        for text in texts[:_MOST_ESCAPED]
        if (written := "".join(BYTE_CHARACTERS[byte] for byte in text.encode()))
    ]
    decoder = {"type": "Sequence", "decoders": [*escaped, level]} if escaped else level
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*_splits(pre), level]},
        "decoder": decoder,
    }


def _reads_as_bytes(token: str) -> bool:
    return not token.isascii() and all(character in BYTE_CHARACTERS for character in token)


def _ends(header: Header, vocabulary: Vocabulary, pre: PreTokenizer | None) -> dict[str, Any]:
    """What a text begins and ends with. (transformers forgets flags that say so.)"""
    adds = {
        "bos": flag_of(header, "add_bos_token", True if pre is None else pre.add_bos)
        or vocabulary.model == "gemma4",
        "eos": flag_of(header, "add_eos_token", False),
    }
    ends = {role: vocabulary.role(role) for role, added in adds.items() if added}
    ids = {vocabulary.tokens[number]: number for number in ends.values() if number is not None}

    def around(text: str, kind: int) -> list[dict[str, Any]]:
        parts = [("SpecialToken", ends.get("bos")), ("Sequence", text)]
        parts.append(("SpecialToken", ends.get("eos")))
        return [
            {
                what: {
                    "id": vocabulary.tokens[each] if isinstance(each, int) else each,
                    "type_id": kind,
                }
            }
            for what, each in parts
            if each is not None
        ]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [number], "tokens": [token]}
            for token, number in ids.items()
        },
    }


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _splits(pre: PreTokenizer) -> list[dict[str, Any]]:
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    return [{**split, "pattern": {"Regex": pattern}} for pattern in pre.patterns]


def _pieces_decoder(strip: bool) -> dict[str, Any]:
    decoders = [_replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if strip:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": decoders}


def _pairs_of_pieces(header: Header, vocabulary: Vocabulary, quoted: dict[str, str]) -> list[str]:
    """All pairs of pieces that are a piece together, those of the best piece first; as JSON."""
    if vocabulary.scores is None:
        raise unreadable(header, _SCORES, "is missing")
    ids = {
        token: number
        for number, token in enumerate(vocabulary.tokens)
        if vocabulary.kinds[number] in _MERGED and number not in vocabulary.controls
    }
    longest = max(map(len, ids), default=0)
    if longest > _LONGEST_PIECE or sum(map(len, ids)) > _MOST_CHARACTERS:
        raise unreadable(header, "tokenizer.ggml.tokens", "has pieces of more than a word")
    pairs, begins = dict[int, str](), list[str]()
    for piece in sorted(ids):
        while begins and not piece.startswith(begins[-1]):
            begins.pop()  # what is left are all pieces that this one begins with
        halves = [left for left in begins if piece[len(left) :] in ids]
        if len(halves) > 1:
            halves.sort(key=ids.__getitem__)
        if halves:
            written = [f"[{quoted[left]},{quoted[piece[len(left) :]]}]" for left in halves]
            pairs[ids[piece]] = ",\n".join(written)
        begins.append(piece)
    # Of pieces with the same score the first one is first.
    best = sorted(ids.values(), key=vocabulary.scores.__getitem__, reverse=True)
    return [pairs[number] for number in best if number in pairs]


def _stored_merges(header: Header, vocabulary: Vocabulary, quoted: dict[str, str]) -> list[str]:
    """The merges in the header, those of tokens that became added ones left out; as JSON."""
    if vocabulary.merges is None:
        raise unreadable(header, _MERGES, "is missing")
    made = dict[str, None]()
    for merge in vocabulary.merges:
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at > 0 and left in quoted and right in quoted and left + right in quoted:
            made[f"[{quoted[left]},{quoted[right]}]"] = None
        elif at < 1 or not all(
            each in quoted or each.translate(_AS_TEXT) in quoted
            for each in (left, right, left + right)
        ):
            raise unreadable(header, _MERGES, f"has {merge[:40]!r}, which are no two tokens")
    return [*made]


def _added_tokens(header: Header, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """The tokens that are found in a text before all else."""
    name = (text_of(header, "general.name") or "").lower()
    is_phi3 = any(each in name for each in _PHI3)
    return [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": is_phi3 and token not in _KEEP_SPACES,
            "normalized": False,
            "special": number in vocabulary.controls,
        }
        for number, token in enumerate(vocabulary.tokens)
        if vocabulary.kinds[number] == Kind.USER_DEFINED or number in vocabulary.controls
    ]


def _config(vocabulary: Vocabulary, added: list[dict[str, Any]]) -> dict[str, Any]:
    """The file tokenizer_config.json.

    transformers would replace the tokenizer by one of its own for some models (it does so for Qwen
    2 and 3.5), unless the config names code of its own. It names none that could be run.
    """
    named = {
        key: vocabulary.tokens[number]
        for role, key in _NAMED.items()
        if (number := vocabulary.role(role)) is not None
        and (role != "padding" or vocabulary.kinds[number] != Kind.NORMAL)
    }
    special = {
        str(each["id"]): {key: value for key, value in each.items() if key != "id"}
        for each in added
        if each["content"] in named.values()
    }
    return {
        "tokenizer_class": "TokenizersBackend",
        "auto_map": {"AutoTokenizer": ["", ""]},
        "backend": "tokenizers",
        "added_tokens_decoder": special,
        "clean_up_tokenization_spaces": False,
        "fix_mistral_regex": False,
        "model_max_length": 10**30,
        **named,
    }


def _generation(vocabulary: Vocabulary) -> dict[str, Any]:
    """The file generation_config.json."""
    ends = stop_ids(vocabulary)
    made: dict[str, Any] = {"eos_token_id": ends} if ends else {}
    for role, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if (number := vocabulary.role(role)) is not None:
            made[key] = number
    return made


def _templates(header: Header) -> dict[str, str]:
    """The files of the chat templates that the header has."""
    named = {
        name: template
        for key in header.fields
        if (name := key.removeprefix(f"{_TEMPLATE}.")) != key
        and _TEMPLATE_NAME.fullmatch(name)
        and (template := text_of(header, key))
    }
    default = text_of(header, _TEMPLATE) or named.get("default")
    named.pop("default", None)
    plain = [name for name in named if name != _WITH_TOOLS]
    if not default and len(plain) == 1:
        default = named.pop(plain[0])
    files = {} if not default else {"chat_template.jinja": default}
    if files:
        files |= {f"additional_chat_templates/{name}.jinja": text for name, text in named.items()}
    return files
