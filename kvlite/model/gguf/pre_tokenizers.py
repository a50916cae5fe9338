"""How byte-level BPE cuts a text into words, by the names of `tokenizer.ggml.pre`.

Source: llama.cpp's llama-vocab.cpp, which knows these names. Where its regular expressions only
approximate those that models publish (upper and lower case beyond ASCII, combining marks, Han), the
published ones are here, as vocabularies were trained with them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PreTokenizer:
    """What belongs to a name.

    Attributes:
        patterns: each cuts what those before it left; what it finds is cut out, and so is what lies
            between.
        ignore_merges: a word that is a token is taken whole.
        add_bos: a text begins with the BOS token, unless the file says otherwise.
        raw: tokens are text with U+2581 for spaces, not bytes written as characters.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    raw: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_HAN = r"&&[^\p{Han}]"


def _cased(ending: str, but: str = "") -> str:
    """Words that begin with capitals and go on without, or are all capitals."""
    begin, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    return f"{begin}{upper}*{lower}+{ending}|{begin}{upper}+{lower}*{ending}"


_SLASHED = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_O200K = rf"{_cased(f'{_CONTRACTION}?')}|\p{{N}}{{1,3}}|{_SLASHED}"
_TEKKEN = rf"{_cased('')}|\p{{N}}|{_SLASHED}"
_KIMI = rf"\p{{Han}}+|{_cased(f'{_CONTRACTION}?', _HAN)}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"

_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+"
)
_DEEPSEEK3_WORDS = rf"{_DEEPSEEK3}[\r\n]*|{_SPACES}"
# Letters with case, of an earlier Unicode and without mathematical ones.
_DEEPSEEK_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10D0}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2F}"
    r"\x{A790}-\x{A7FF}\x{AB30}-\x{AB6F}\x{10570}-\x{105BF}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7FF}"
    r"\x{1DF00}-\x{1DFFF}]]"
)
_DEEPSEEK_SIGNS = r"[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]"
_YOUTU = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|"
    r"[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}"
    r"\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+|" + _KANA
)
_AFMOE = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}"
    r"\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{E40}-\x{E7F}\x{E80}-\x{EFF}\x{1780}-\x{17FF}"
    r"\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"
_FALCON = r"[\p{P}$+<=>\^~|`]+"
_LINES = r"[^\n]+|\n+"
_HALVES = "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))

_GPT2_WORDS = PreTokenizer((_GPT2,))
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_WORDS = PreTokenizer((_LLAMA3,))
_LLAMA3_WHOLE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_WORDS = PreTokenizer((_QWEN2,))
_O200K_WORDS = PreTokenizer((_O200K,))
_DEEPSEEK3_PARTS = PreTokenizer((r"\p{N}{1,3}", _KANA, _DEEPSEEK3_WORDS))
_BLOOM_WORDS = PreTokenizer((_BLOOM,))
_TINY_AYA = PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K))
_BAILING = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)

# GPT-2's characters for bytes: those that can be printed are themselves.
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_CHARACTER = {byte: chr(byte) for byte in _PRINTED} | {
    byte: chr(256 + number) for number, byte in enumerate(_OTHERS)
}
BYTE_CHARACTERS = [_CHARACTER[byte] for byte in range(256)]

# Files from before there were names.
DEFAULT = "default"

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion", "granite-docling"),
        _GPT2_WORDS,
    ),
    **dict.fromkeys(
        ("gigachat", "a.x-4.0", "mellum", "modern-bert", "jina-es", "jina-de"), _GPT2_WORDS
    ),
    **dict.fromkeys(("jina-v2-es", "jina-v2-de"), _GPT2_WORDS),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell"), _DIGITS),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1"), _LLAMA3_WHOLE),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2", "jina-v5-nano"), _LLAMA3_WHOLE),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3_WORDS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _QWEN2_WORDS),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), _QWEN2_WORDS),
    "qwen35": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
            rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        )
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _O200K_WORDS),
    "granite-embed-multi-97m": PreTokenizer((_O200K,), ignore_merges=True),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _TINY_AYA),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?{_DEEPSEEK_LETTERS}+",
            rf"\s?{_DEEPSEEK_SIGNS}+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3_PARTS),
    "spark2_5": PreTokenizer(
        (r"\p{N}{1,3}", _KANA, rf"{_DEEPSEEK3}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")
    ),
    "youtu": PreTokenizer(
        (_YOUTU, rf"{_cased(f'{_CONTRACTION}?')}|\p{{N}}|{_SLASHED}"), ignore_merges=True
    ),
    "falcon": PreTokenizer((_FALCON, _GPT2, "[0-9][0-9][0-9]")),
    DEFAULT: PreTokenizer((r"[\p{P}$+<=>\^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), _BLOOM_WORDS),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "seed-coder": PreTokenizer(
        (rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
    ),
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}",)),
    "afmoe": PreTokenizer((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _AFMOE, _DEEPSEEK3_WORDS)),
    "laguna": PreTokenizer((_LINES, _QWEN2)),
    "exaone-moe": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|"
            rf"\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SIGNS}|{_SPACES}"), ignore_merges=True
    ),
    "jais-2": PreTokenizer(
        (
            rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|"
            rf"{_HALVES}|\s{{1,2}}(?!\S)|\s",
        )
    ),
    **dict.fromkeys(
        ("gemma4", "granite-embed-multi-311m"), PreTokenizer((_LINES,), add_bos=True, raw=True)
    ),
    "sarvam-moe": PreTokenizer((_LINES,), raw=True),
}
