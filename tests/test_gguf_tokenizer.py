"""Tokenizers of GGUF headers: every rule, decoding, templates, what ends an answer, damage."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvlite.engine.detokenizer import TextStream
from kvlite.errors import ModelError
from kvlite.model.control_tokens import Controls
from kvlite.model.gguf.header import read_header
from kvlite.model.gguf.pre_tokenizers import PRE_TOKENIZERS
from kvlite.model.gguf.tokenizer import write_tokenizer
from kvlite.model.gguf.vocabulary import Vocabulary
from tests.gguf_vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNUSED,
    USER,
    bytes_of,
    named,
    pieces_of,
    write_header,
)

REAL = Path(os.environ.get("KVLITE_REAL", Path(__file__).parents[2] / "shared/real")) / "vocabs"
BESIDE = (None, "llama", "qwen2", "phi3")


def tokenizer_of(folder: Path, fields: dict[str, Any], architecture: str = "llama") -> Any:
    path = write_header(folder / "m.gguf", fields, architecture)
    write_tokenizer(read_header(path), folder)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def encoded(tokenizer: Any, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return list(tokenizer.convert_ids_to_tokens(ids))


@pytest.mark.parametrize("name", ["deepseek-coder", "deepseek-llm", "gpt-2", "llama-spm", "phi-3"])
def test_real_vocabularies_give_the_ids_of_the_original_tokenizers(
    name: str, tmp_path: Path
) -> None:
    path = REAL / f"ggml-vocab-{name}.gguf"
    if not path.is_file():
        pytest.skip(f"there is no {path}: name the folder above it by KVLITE_REAL")
    text = Path(f"{path}.inp").read_bytes().decode()
    texts = text.split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().split("\n")
    expected = [[int(number) for number in line.split()] for line in lines][: len(texts)]
    write_tokenizer(read_header(path), tmp_path)
    for beside in BESIDE:
        if beside is not None:
            (tmp_path / "config.json").write_text(json.dumps({"model_type": beside}))
        tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
        assert tokenizer(texts, add_special_tokens=False)["input_ids"] == expected, beside
    assert [tokenizer.decode(ids) for ids in expected] == texts
    for ids, said in zip(expected, texts, strict=True):
        stream = TextStream(tokenizer)
        assert "".join([*map(stream.push, ids), stream.flush()]) == said
    end = tokenizer.eos_token
    around = tokenizer.encode(f"{texts[3]}{end}", add_special_tokens=False)
    assert around == [*expected[3], tokenizer.eos_token_id]


def test_pieces_get_a_space_before_them_and_after_special_tokens_unless_the_header_says_no(
    tmp_path: Path,
) -> None:
    tokenizer = tokenizer_of(tmp_path, pieces_of(f"{SPACE}hello"))
    assert encoded(tokenizer, "hello hello") == [f"{SPACE}hello", f"{SPACE}hello"]
    assert encoded(tokenizer, " hello") == [SPACE, f"{SPACE}hello"]
    said = ["<s>", f"{SPACE}hello", "</s>", f"{SPACE}hello"]
    assert encoded(tokenizer, "<s>hello</s>hello") == said
    assert encoded(tokenizer, "") == []
    assert tokenizer.encode("hello")[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokenizer.encode(" hello", add_special_tokens=False)) == " hello"
    without = named(add_space_prefix=False, add_bos_token=False)
    tokenizer = tokenizer_of(tmp_path, pieces_of("hello") | without)
    assert encoded(tokenizer, "hello") == ["hello"]
    assert tokenizer.encode("hello") == tokenizer.encode("hello", add_special_tokens=False)


def test_what_is_no_piece_is_bytes_and_comes_back_whole(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, pieces_of(f"{SPACE}a"))
    assert encoded(tokenizer, "a🙂") == [f"{SPACE}a", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    ids, stream = tokenizer.encode("a🙂 a\n", add_special_tokens=False), TextStream(tokenizer)
    pieces = [*map(stream.push, ids), stream.flush()]
    assert "".join(pieces) == tokenizer.decode(ids) == "a🙂 a\n"
    assert all("\ufffd" not in piece for piece in pieces)


def test_text_that_spells_a_byte_or_filler_is_text(tmp_path: Path) -> None:
    spelled = [f"{SPACE}<0x0A>"[1:], "[PAD9]"]
    fields = pieces_of("<0x0A", "[PAD9", ">", "]", more=[("[PAD9]", UNUSED)])
    tokenizer = tokenizer_of(tmp_path, fields | named(add_space_prefix=False))
    assert encoded(tokenizer, spelled[0]) == ["<0x0A", ">"]
    assert encoded(tokenizer, spelled[1]) == ["[PAD9", "]"]


def test_users_tokens_are_found_in_any_text_as_they_are_written(tmp_path: Path) -> None:
    fields = pieces_of(f"{SPACE}a", f"{SPACE}b", more=[("  b", USER), ("<|x|>", CONTROL)])
    tokenizer = tokenizer_of(tmp_path, fields)
    assert encoded(tokenizer, "a  b") == [f"{SPACE}a", "  b"]
    assert encoded(tokenizer, "a<|x|>b") == [f"{SPACE}a", "<|x|>", f"{SPACE}b"]
    ids = tokenizer.encode("a  b<|x|>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a  b"
    spelled = Controls(tokenizer).alone("a<|x|>").ids
    assert "<|x|>" not in tokenizer.convert_ids_to_tokens(spelled)


def test_phi3s_special_tokens_take_the_white_space_after_them(tmp_path: Path) -> None:
    fields = pieces_of(f"{SPACE}a", more=[("<|end|>", CONTROL)]) | {"general.name": "Phi-3 Mini"}
    tokenizer = tokenizer_of(tmp_path, fields)
    assert encoded(tokenizer, "a<|end|> \n a") == [f"{SPACE}a", "<|end|>", f"{SPACE}a"]
    assert encoded(tokenizer, "<s> a")[:2] == ["<s>", SPACE]


def test_bytes_of_users_tokens_come_back(tmp_path: Path) -> None:
    fields = bytes_of("ab", more=[("    ", USER), ("ÿ~", USER)], pre="gpt-2")
    tokenizer = tokenizer_of(tmp_path, fields)
    text = "ab    ÿ~ü\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(ids)[:3] == ["ab", "    ", "ÿ~"]


WORDS = {
    "": ("a 1234 (b)", "a Ġ 123 4 Ġ ( b )"),
    "gpt-2": ("it's 1234 ½IT'S", "it 's Ġ1234 ĠÂ½ IT ' S"),
    "starcoder": ("a 123", "a Ġ 1 2 3"),
    "llama-bpe": ("IT'S 12345\n\n x", "IT 'S Ġ 123 45 ĊĊ Ġx"),
    "qwen2": ("it'S 12", "it 'S Ġ 1 2"),
    "deepseek-llm": ("4 ½", "4 Ġ Â½"),
    "deepseek-coder": ("4 ½", "4 Ġ Â½"),
    "deepseek-v3": ("a1234日本b", "a 123 4 æĹ¥æľ¬ b"),
    "falcon": ("x 1000 (a)", "x Ġ 100 0 Ġ ( a )"),
    "gpt-4o": ("camelCase'S ÉCOLE", "camel Case'S ĠÃīCOLE"),
    "tekken": ("camelCase'S 12", "camel Case 'S Ġ 1 2"),
    "glm4": ("a 1234", "a Ġ 123 4"),
    "viking": ("a.b 12", "a . b Ġ 1 2"),
    "kimi-k2": ("a日本b 1", "a æĹ¥æľ¬ b Ġ 1"),
    "afmoe": ("12345678", "12 345 678"),
    "superbpe": ("a b 1234567", "aĠbĠ 1 234 567"),
    "seed-coder": ("a!\n12", "a ! Ċ 1 2"),
    "qwen35": ("e\u0301a", "eÌģa"),
}


@pytest.mark.parametrize("pre", WORDS)
def test_text_is_cut_into_words_as_the_name_says(pre: str, tmp_path: Path) -> None:
    named = {"pre": pre} if pre else {}  # without a name by the oldest rules
    tokenizer = tokenizer_of(tmp_path, bytes_of("ab", **named))
    text, expected = WORDS[pre]
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert " ".join(word for word, _ in cut) == expected


def test_every_name_can_be_loaded_and_loses_nothing(tmp_path: Path) -> None:
    text = "ab 日本 12345.6\r\n\n\t x's É"
    for pre, rules in PRE_TOKENIZERS.items():
        fields = bytes_of("ab", pre=pre)
        if rules.raw:
            fields = pieces_of("ab", SPACE) | named(model="gpt2", pre=pre, merges=["a b"])
        tokenizer = tokenizer_of(tmp_path, fields)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text, pre


def test_a_word_that_is_a_token_is_taken_whole_where_the_name_says_so(tmp_path: Path) -> None:
    more = [("xyz", NORMAL)]
    for pre, expected in (("llama-bpe", ["xyz"]), ("qwen2", ["x", "y", "z"])):
        folder = tmp_path / pre
        folder.mkdir()
        tokenizer = tokenizer_of(folder, bytes_of("ab", more=more, pre=pre))
        assert encoded(tokenizer, "xyz") == expected
        assert (len(tokenizer.encode("ab")) == 2) == (pre == "llama-bpe")


def test_gemma4_merges_characters_and_begins_with_bos(tmp_path: Path) -> None:
    fields = pieces_of("ab", f"ab{SPACE}ab", "\n\n", more=[("  ", USER)])
    merges = [f"ab{SPACE} ab", "a b", f"ab {SPACE}", "\n \n", f"{SPACE} {SPACE}"]
    fields |= named(model="gemma4", merges=merges, add_bos_token=False)
    tokenizer = tokenizer_of(tmp_path, fields, "gemma4")
    assert encoded(tokenizer, "ab ab\n\nab  é") == [
        f"ab{SPACE}ab",
        "\n\n",
        "ab",
        "  ",
        "<0xC3>",
        "<0xA9>",
    ]
    assert tokenizer.encode("ab")[0] == 1
    assert tokenizer.decode(tokenizer.encode(" ab é")[1:]) == " ab é"


def refused(folder: Path, fields: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as error:
        tokenizer_of(folder, fields)
    return str(error.value)


def test_what_is_not_known_is_refused_by_its_name(tmp_path: Path) -> None:
    assert "'new-rules' (tokenizer.ggml.pre)" in refused(tmp_path, bytes_of("a", pre="new-rules"))
    assert "'t5' (tokenizer.ggml.model)" in refused(tmp_path, pieces_of("a") | named(model="t5"))


DAMAGE: dict[str, dict[str, Any]] = {
    "model is missing": {"model": None},
    "tokens is missing": {"tokens": None},
    "token_type has 2 values": {"token_type": [1, 1]},
    "scores is missing": {"scores": None},
    "bos_token_id is 5,000": {"bos_token_id": 5000},
    "eos_token_id is no whole": {"eos_token_id": "x"},
    "add_bos_token is neither": {"add_bos_token": 3},
    "eos_token_ids has 900": {"eos_token_ids": [900]},
}


@pytest.mark.parametrize("said", DAMAGE)
def test_damage_is_a_sentence_that_names_the_field(said: str, tmp_path: Path) -> None:
    fields = {**pieces_of("a"), **named(**DAMAGE[said])}
    kept = {key: value for key, value in fields.items() if value is not None}
    assert f"tokenizer.ggml.{said}" in refused(tmp_path, kept)


def test_tokens_must_be_distinct_and_merges_of_tokens(tmp_path: Path) -> None:
    twice = pieces_of("a")
    twice["tokenizer.ggml.tokens"][5] = "<s>"
    assert "'<s>' twice, as 1 and 5" in refused(tmp_path, twice)
    assert "merges has 'q zz'" in refused(tmp_path, bytes_of("a") | named(merges=["q zz"]))
    assert "merges has 'ab'" in refused(tmp_path, bytes_of("a") | named(merges=["ab"]))


def test_ids_that_stand_for_none_are_none(tmp_path: Path) -> None:
    fields = pieces_of("a") | named(bos_token_id=-1, padding_token_id=70_000)
    tokenizer = tokenizer_of(tmp_path, fields)
    assert (tokenizer.bos_token, tokenizer.pad_token) == ("<s>", None)


def _mutated(fields: dict[str, Any], rnd: random.Random) -> dict[str, Any]:
    made = {**fields}
    for _ in range(rnd.randint(1, 3)):
        key = rnd.choice(list(made))
        value = made[key]
        if isinstance(value, list) and rnd.random() < 0.8:
            value, at = [*value], rnd.randrange(len(value))
            strange = ["", "\n", "a" * 3000, "\ufffd x", " ", "  ", "<0x0A>", "\x00", "<s>", "a b"]
            if isinstance(value[0], str):
                value[at] = rnd.choice([*strange, value[at - 1]])
            else:
                numbers = [0, -1, 7, 255, 3, 2**31 - 1]
                value[at] = type(value[0])(rnd.choice(numbers))
            made[key] = value[: rnd.choice([len(value), at + 1])]
        else:
            made[key] = rnd.choice([True, "", "x", 2**40, -7, 0.5, [1, 2], ["a"], ["\x00", ""]])
        if rnd.random() < 0.1:
            made.pop(rnd.choice(list(made)))
        if not made:
            break
    return {key: value for key, value in made.items() if value != []}


def test_corrupt_headers_end_in_a_sentence(tmp_path: Path) -> None:
    rnd = random.Random(0)
    more = [("<|x|>", CONTROL), ("  ", USER), ("<pad>", UNUSED)]
    kinds = [
        pieces_of(f"{SPACE}hello", "world", more=more) | named(add_bos_token=True),
        bytes_of("hello", " world", more=more, pre="qwen2"),
        pieces_of("ab", more=more) | named(model="gemma4", merges=["a b"]),
    ]
    for _ in range(200):
        fields = _mutated(rnd.choice(kinds), rnd)
        try:
            tokenizer = tokenizer_of(tmp_path, fields)
        except ModelError as error:
            assert "\n" not in str(error)
        else:
            tokenizer.decode(tokenizer.encode("hello  world <s><|x|> é日"))


def test_ends_of_answers_are_named_by_the_header_or_by_their_text(tmp_path: Path) -> None:
    def ends(names: str, **more: int | list[int]) -> set[str]:
        tokens = [*names.split(), "a", "b"]
        fields = named(model="gpt2", tokens=tokens, merges=["x y"], **more)
        header = read_header(write_header(tmp_path / "e", fields))
        return {tokens[at] for at in Vocabulary.read(header).ends}

    assert ends("<|im_end|> </s> <|x|>") == {"<|im_end|>", "</s>"}
    assert ends("<|user|> <|obs|>", eot_token_id=0, eom_token_id=1, eos_token_id=2) == {
        "<|user|>",
        "<|obs|>",
        "a",
    }
    assert ends("<|return|> <|call|> <|end|>") == {"<|return|>", "<|call|>"}
    assert ends("<|end|> <|return|>") == {"<|end|>", "<|return|>"}
    assert ends("<turn|> <|tool_response> </s> <eos>") == {"<turn|>", "<|tool_response>", "<eos>"}
    assert ends("<|fim_pad|> <|file_sep|> <|q|>", fim_rep_token_id=2) == {
        "<|fim_pad|>",
        "<|file_sep|>",
        "<|q|>",
    }
    assert ends("<e1> <e2>", eos_token_ids=[0, 1]) == {"<e1>", "<e2>"}
    assert ends("x y z") == set()


def test_they_are_written_for_transformers(tmp_path: Path) -> None:
    tokenizer_of(tmp_path, pieces_of("a", more=[("<|eot_id|>", CONTROL), ("<|x|>", BYTE)]))
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written == {"eos_token_id": [2, 259], "bos_token_id": 1}


def test_templates_are_kept_by_name_and_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    key = "tokenizer.chat_template"
    templates = {key: "plain", f"{key}.tool_use": "tools", f"{key}.../../x": "out"}
    tokenizer = tokenizer_of(tmp_path, {**pieces_of("a"), **templates})
    assert tokenizer.chat_template == {"default": "plain", "tool_use": "tools"}
    asked = [{"role": "user", "content": "?"}]
    assert tokenizer.apply_chat_template(asked, tokenize=False).startswith("plain")
    assert tokenizer.apply_chat_template(asked, tools=[{}], tokenize=False) == "tools"


def test_a_single_template_is_the_default(tmp_path: Path) -> None:
    cases = ({}, None), ({"": ""}, None), ({".default": "d"}, "d"), ({".rag": "r"}, "r")
    for number, (templates, expected) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        fields = {f"tokenizer.chat_template{name}": text for name, text in templates.items()}
        assert tokenizer_of(folder, {**pieces_of("a"), **fields}).chat_template == expected
