"""A tokenizer in a GGUF file's header, as the files that transformers reads.

Source: llama.cpp's llama-vocab.cpp, for what the fields mean. SentencePiece joins the two
neighbours whose joint piece has the best score; `tokenizers` joins those that come first in a list
of merges. So the list has all pairs of pieces that make a piece, those of the best one first.
"""

import json
import re
from json.encoder import encode_basestring
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlite.config.atomic_file import replaced
from kvlite.config.checked_file import from_json
from kvlite.errors import ModelError
from kvlite.model.gguf.header import Header
from kvlite.model.gguf.pre_tokenizers import BYTE_CHARACTERS, DEFAULT, PRE_TOKENIZERS, PreTokenizer
from kvlite.model.gguf.vocabulary import PREFIX, Kind, Vocabulary, flag_of, text_of, unreadable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PRE, _MERGES, _TEMPLATE = f"{PREFIX}pre", f"{PREFIX}merges", "tokenizer.chat_template"
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
    answer) and the chat templates, of which AutoTokenizer makes the tokenizer in the header. Raises
    ModelError if the tokenizer is damaged, or of a kind that is not read here; OSError if the file
    cannot be read, or the folder not written."""
    vocabulary = Vocabulary.read(header)
    added = _added_tokens(vocabulary)
    # The config comes last: it says that the others are there.
    files = {
        "tokenizer.json": _tokenizer_json(vocabulary, _pre_tokenizer(vocabulary), added),
        **_templates(header),
        "generation_config.json": json.dumps(_generation(vocabulary), indent=1),
        "tokenizer_config.json": json.dumps(_config(vocabulary, added), indent=1),
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as file:
            file.write(text.encode())


def _pre_tokenizer(vocabulary: Vocabulary) -> PreTokenizer | None:
    if vocabulary.model == "llama":
        return None
    if vocabulary.model == "gemma4":
        return PRE_TOKENIZERS["gemma4"]
    name = text_of(vocabulary.header, _PRE) or DEFAULT
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{vocabulary.header.paths[0]} has a tokenizer that cuts text by rules called "
            f"{name[:40]!r} ({_PRE}), which kvlite does not know: use a newer kvlite, or another "
            "model"
        )
    return PRE_TOKENIZERS[name]


def _tokenizer_json(
    vocabulary: Vocabulary, pre: PreTokenizer | None, added: list[dict[str, Any]]
) -> str:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    quoted = {token: encode_basestring(token) for token in vocabulary.tokens}
    merges = (_pairs_of_pieces if pre is None else _stored_merges)(vocabulary, quoted)
    raw, unknown = pre is None or pre.raw, vocabulary.role("unknown")
    bytes_ = all(f"<0x{byte:02X}>" in quoted for byte in range(256))
    made = Tokenizer(
        BPE(
            unk_token=vocabulary.tokens[unknown] if raw and unknown is not None else None,
            fuse_unk=raw,
            byte_fallback=raw and bytes_,
            ignore_merges=pre is not None and pre.ignore_merges,
        )
    )
    if pre is None or pre.raw:
        _set_raw(made, pre, flag_of(vocabulary.header, "add_space_prefix", True))
    else:
        _set_byte_level(made, pre, vocabulary)
    _set_ends(made, vocabulary, pre)
    frame = from_json(made.to_str()) | {"added_tokens": added}
    model = frame.pop("model")
    del model["vocab"], model["merges"]
    entries = ",\n".join(f"{each}:{number}" for number, each in enumerate(quoted.values()))
    pairs = ",\n".join(merges)
    head = json.dumps(frame, ensure_ascii=False)[:-1]
    begin = json.dumps(model, ensure_ascii=False)[:-1]
    return f'{head},\n"model":{begin},\n"vocab":{{\n{entries}}},\n"merges":[\n{pairs}]}}}}\n'


def _set_raw(made: "Tokenizer", pre: PreTokenizer | None, prefix: bool) -> None:
    """BPE over characters, or SentencePiece; this with a space before what follows nothing, or a
    special token."""
    from tokenizers import decoders, normalizers, pre_tokenizers

    prefix = prefix and pre is None
    begin = [normalizers.Prepend(_SPACE)] if prefix else []
    end = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", _SPACE)])
    if pre is not None:
        made.pre_tokenizer = pre_tokenizers.Sequence(_splits(pre))
    pieces = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*pieces, *end])


def _set_byte_level(made: "Tokenizer", pre: PreTokenizer, vocabulary: Vocabulary) -> None:
    from tokenizers import Regex, decoders, pre_tokenizers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*_splits(pre), level])
    # The decoder would take a user's token such as \u00fc for the byte that is written so.
    texts = [
        token
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind == Kind.USER_DEFINED
        and not token.isascii()
        and all(character in BYTE_CHARACTERS for character in token)
    ]
    escaped = [
        decoders.Replace(
            Regex(rf"\A{re.escape(text)}\z"),
            "".join(BYTE_CHARACTERS[byte] for byte in text.encode()),
        )
        for text in texts[:_MOST_ESCAPED]
    ]
    made.decoder = decoders.Sequence([*escaped, decoders.ByteLevel()])


def _set_ends(made: "Tokenizer", vocabulary: Vocabulary, pre: PreTokenizer | None) -> None:
    """What a text begins and ends with. (transformers forgets flags that say so.)"""
    from tokenizers.processors import TemplateProcessing

    adds = {
        "bos": flag_of(vocabulary.header, "add_bos_token", True if pre is None else pre.add_bos)
        or vocabulary.model == "gemma4",
        "eos": flag_of(vocabulary.header, "add_eos_token", False),
    }
    ids = {role: vocabulary.role(role) for role, added in adds.items() if added}
    begin, end = ([role] if ids.get(role) is not None else [] for role in ("bos", "eos"))
    made.post_processor = TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, *(f"{each}:1" for each in (*begin, "$B", *end))],
        special_tokens=[
            {"id": role, "ids": [number], "tokens": [vocabulary.tokens[number]]}
            for role, number in ids.items()
            if number is not None
        ],
    )


def _splits(pre: PreTokenizer) -> list[Any]:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    return [Split(Regex(pattern), "isolated") for pattern in pre.patterns]


def _pairs_of_pieces(vocabulary: Vocabulary, quoted: dict[str, str]) -> list[str]:
    """All pairs of pieces that are a piece together, those of the best piece first; as JSON."""
    if vocabulary.scores is None:
        raise unreadable(vocabulary.header, f"{PREFIX}scores", "is missing")
    ids = {
        token: number
        for number, token in enumerate(vocabulary.tokens)
        if vocabulary.kinds[number] in _MERGED and number not in vocabulary.controls
    }
    longest = max(map(len, ids), default=0)
    if longest > _LONGEST_PIECE or sum(map(len, ids)) > _MOST_CHARACTERS:
        why = "has pieces of more than a word"
        raise unreadable(vocabulary.header, f"{PREFIX}tokens", why)
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


def _stored_merges(vocabulary: Vocabulary, quoted: dict[str, str]) -> list[str]:
    if vocabulary.merges is None:
        raise unreadable(vocabulary.header, _MERGES, "is missing")
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
            why = f"has {merge[:40]!r}, which are no two tokens"
            raise unreadable(vocabulary.header, _MERGES, why)
    return [*made]


def _added_tokens(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    name = (text_of(vocabulary.header, "general.name") or "").lower()
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
    made: dict[str, Any] = {"eos_token_id": vocabulary.ends} if vocabulary.ends else {}
    for role, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if (number := vocabulary.role(role)) is not None:
            made[key] = number
    return made


def _templates(header: Header) -> dict[str, str]:
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
