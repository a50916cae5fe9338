"""No control token comes out of what is said, in the tokenizers of all admitted families."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from kvlite.conversation.sources import message_passages
from kvlite.documents import Document
from kvlite.model.chat_template import (
    certain,
    goes_on,
    question_about,
    said_parts,
    said_tokens,
    text_tokens,
)
from tests.families import FAMILIES, GEMMA_TEXT

# What each family's turns are made of: found in a text, these would end the user's.
TURNS = {
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "phi3": ["<|system|>", "<|user|>", "<|end|>", "<|assistant|>", "<s>", "</s>"],
    "gemma2": ["<bos>", "<start_of_turn>", "<end_of_turn>", "<mask>", "[@BOS@]"],
    "gemma3": ["<bos>", "<start_of_turn>", "<end_of_turn>", "<image_soft_token>", "<unused7>"],
    "mistral-v0.3": ["<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "</s>"],
    "mixtral": ["<s>", "</s>", "<unk>"],
    "qwen2": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
    "qwen2.5": ["<|im_start|>", "<|im_end|>", "<tool_call>", "<|fim_prefix|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "</tool_call>"],
    "smollm2": ["<|im_start|>", "<|im_end|>", "<filename>", "<|endoftext|>"],
}
WAYS = [(True, "Be brief."), (True, ""), (False, "")]
HARMLESS = "some words"


@cache
def made(family: str) -> Any:
    return FAMILIES[family].tokenizer()


def controls_in(family: str, ids: Sequence[int]) -> list[int]:
    """Those among tokens, by the family's table alone."""
    known = {*made(family).convert_tokens_to_ids(FAMILIES[family].controls)}
    return [token for token in ids if token in known]


def said(family: str, text: str, *, opening: bool = True, system: str = "") -> list[int]:
    return said_tokens(made(family), text, opening=opening, first=opening, system=system)


def require_none(family: str, text: str) -> None:
    """A text as a message, a system prompt and a text of its own has no controls."""
    for opening, system in WAYS:
        ids = said(family, text, opening=opening, system=system)
        harmless = said(family, HARMLESS, opening=opening, system=system)
        assert controls_in(family, ids) == controls_in(family, harmless)
    ids, harmless = (said(family, HARMLESS, system=each) for each in (text, HARMLESS))
    if text.strip():
        assert controls_in(family, ids) == controls_in(family, harmless)
    ids = text_tokens(made(family), text, first=False)
    assert controls_in(family, ids) == []


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_added_token_comes_out_of_a_text(family: str) -> None:
    every = FAMILIES[family].controls
    chosen = [*TURNS[family], *every[:20], *every[-20:]]
    for control in dict.fromkeys(chosen):
        require_none(family, f"words {control} and {control}words")
        require_none(family, control)
    require_none(family, " ".join(every))
    require_none(family, "".join(every))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forged_turn_is_read_as_its_characters(family: str) -> None:
    """Nor are spaces put where there were none: the model is shown what is there."""
    turns = TURNS[family]
    for text in ("".join(turns), "a".join(turns), f"x{turns[0]} \n{turns[-1]}y"):
        ids = said(family, f"before {text} after")
        characters = [token for token in ids if token not in controls_in(family, ids)]
        assert f"before {text} after" in made(family).decode(characters)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("opening", "system"), WAYS)
def test_ordinary_text_is_what_the_models_own_tokenizer_makes_of_it(
    family: str, opening: bool, system: str
) -> None:
    tokenizer, text = made(family), "\n <table>\n\n\n<b>1</b>   naïve 日本 <|e nd|> 🙂\t"
    told = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    if not opening:
        told[0] = {"role": "user", "content": "?"}
        told.insert(1, {"role": "assistant", "content": "Yes"})
    elif not system or family in ("gemma2", "mixtral"):
        begin = f"{system}\n\n" if system else ""
        told = [{"role": "user", "content": f"{begin}{text}"}]
    shown = tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
    if not opening:
        shown = shown.partition("Yes")[2]
    expected = tokenizer.encode(shown, add_special_tokens=False)
    assert said(family, text, opening=opening, system=system) == expected


def test_gemmas_added_tokens_of_ordinary_text_stay_tokens() -> None:
    for family in ("gemma2", "gemma3"):
        own = {*made(family).convert_tokens_to_ids(GEMMA_TEXT)}
        ids = text_tokens(made(family), "".join(GEMMA_TEXT), first=False)
        assert set(ids) == {*ids} & own
        # Nor do they where there is a control beside them.
        forged = text_tokens(made(family), "<end_of_turn><table>\n\n<b>", first=False)
        assert sum(token in own for token in forged) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_forged_documents_and_questions_are_read_ahead_and_their_passages_found(
    family: str,
) -> None:
    for control in TURNS[family]:
        for text, question in ((HARMLESS, f"What is {control}?"), (control, "Why?")):
            ahead = certain(lambda text: said(family, text), f"Document: a\n\n{text}")
            whole = said(family, f"Document: a\n\n{text}\n\nBased on it: {question}")
            assert goes_on(whole, ahead)
            assert len(ahead) > len(said(family, "D"))
    document = Document("a.pdf", f"one {''.join(TURNS[family])}\nlast page", ())
    asked = question_about([document], "Why?")
    found = message_passages(made(family), asked, [document], opening=True, first=True)
    ids = said(family, asked)
    assert found is not None and found.tokens == ids
    last = found.passages[-1]
    assert made(family).decode(ids[last.first : last.last]).strip().endswith("last page")
    assert made(family).decode(ids[found.question :]).strip().startswith("Why?")


def test_stand_ins_are_not_looked_for_in_a_text() -> None:
    for word in ("kvliteAnswerHere", "kvliteSystemHere", "kvliteTextHere"):
        text = f"{word}<|im_end|>{word}"
        for opening in (True, False):
            assert text in made("qwen3").decode(said("qwen3", text, opening=opening, system=word))


def test_a_control_that_normalization_makes_comes_out_of_no_text() -> None:
    """Fullwidth letters are the token's own after NFKC, which is looked at where `normalized`."""
    tokenizer = FAMILIES["qwen2"].tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    tokenizer.backend_tokenizer.add_tokens([AddedToken("<turn>", normalized=True)])
    wide = "".join(chr(ord(each) + 0xFEE0) for each in "<turn>")
    turn = tokenizer.convert_tokens_to_ids("<turn>")
    assert turn in tokenizer.encode(wide)
    for text in (wide, f"a {wide}b<turn>", "<|im_start|>" + wide):
        ids = said_tokens(tokenizer, text, opening=True, first=True)
        assert turn not in ids
        assert text_tokens(tokenizer, text, first=True).count(turn) == 0


def test_white_space_that_a_control_takes_along_is_kept() -> None:
    """Also a lot of it, in no more time than it takes to read it."""
    tokenizer = FAMILIES["qwen2"].tokenizer()
    tokenizer.backend_tokenizer.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    text = f"a{' ' * 20_000}<mask>{' ' * 20_000}b"
    ids = said_tokens(tokenizer, text, opening=True, first=True)
    assert tokenizer.convert_tokens_to_ids("<mask>") not in ids
    assert text in tokenizer.decode(ids)


def test_a_control_of_one_character_is_replaced() -> None:
    tokenizer = FAMILIES["qwen2"].tokenizer()
    tokenizer.backend_tokenizer.add_special_tokens(
        [AddedToken("¶"), AddedToken("<x¶", lstrip=True)]
    )
    ids = said_tokens(tokenizer, "one¶two <x¶¶", opening=True, first=True)
    assert "one\ufffdtwo <x\ufffd\ufffd" in tokenizer.decode(ids)
    # One that was added and is no control is ordinary text.
    tokenizer.backend_tokenizer.add_tokens([AddedToken("÷")])
    ids = text_tokens(tokenizer, "one÷two", first=False)
    assert tokenizer.convert_tokens_to_ids("÷") in ids


def test_a_text_swallows_no_control_of_the_template() -> None:
    """As part of a longer one, which begins in the text: they are encoded apart."""
    tokenizer = FAMILIES["qwen2"].tokenizer()
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("x<|im_end|>")])
    harmless, ids = (
        said_tokens(tokenizer, text, opening=True, first=True) for text in ("word", "word x")
    )
    shown = [[token for token in each if token >= 267] for each in (harmless, ids)]
    assert shown[0] == shown[1]
    assert "word x<|im_end|>" in tokenizer.decode(ids)
    assert len(said_parts(tokenizer, "word x", opening=True, first=True)) == 3


class Slow:
    """A tokenizer that does not tell where its tokens come from."""

    is_fast = False
    eos_token_id = None
    chat_template = None

    def __init__(self) -> None:
        own = made("qwen2")
        self.encode, self.decode = own.encode, own.decode
        self.added_tokens_decoder, self.all_special_ids = own.added_tokens_decoder, []


@pytest.mark.parametrize("template", [None, FAMILIES["qwen2"].template])
def test_a_slow_tokenizer_lets_none_through(template: str | None) -> None:
    tokenizer: Any = Slow()
    tokenizer.chat_template = template
    tokenizer.apply_chat_template = made("qwen2").apply_chat_template
    for text in ("a <|im_end|> b", "<|im_start|><|im_end|>"):
        ids = said_tokens(tokenizer, text, opening=True, first=True)
        harmless = said_tokens(tokenizer, HARMLESS, opening=True, first=True)
        assert controls_in("qwen2", ids) == controls_in("qwen2", harmless)
        assert text in tokenizer.decode(ids)


def test_unknown_characters_stay_unknown() -> None:
    """They are no control, though their token has a name."""
    tokenizer = FAMILIES["mixtral"].tokenizer()
    tokenizer.backend_tokenizer.model.byte_fallback = False
    unknown = tokenizer.unk_token_id
    ids = said_tokens(tokenizer, "日 and </s>", opening=True, first=True)
    assert ids.count(unknown) == 1
    assert said_tokens(tokenizer, "a <unk> b", opening=True, first=True).count(unknown) == 0


def pieces(family: str) -> st.SearchStrategy[str]:
    controls = st.sampled_from([*TURNS[family], *FAMILIES[family].controls])
    cut = st.builds(lambda text, at: text[: at % len(text)], controls, st.integers(0, 99))
    rest = st.builds(lambda text, at: text[at % len(text) :], controls, st.integers(0, 99))
    odd = st.sampled_from(
        [
            *(" ", "\n", "\n\n", "\u2581", "\u200b", "\x0b", "\x85"),
            *("é", "e\u0301", "日", "🙂", "\ufeff"),
        ]
    )
    words = st.sampled_from(["user", "assistant", "[INST]", "<b>", "</", "kvliteTextHere"])
    return st.lists(controls | cut | rest | odd | words | st.text(max_size=4), max_size=12).map(
        "".join
    )


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=30)
@given(data=st.data())
def test_no_mixture_makes_a_control(family: str, data: st.DataObject) -> None:
    """In messages, system prompts, and names and texts of documents, across their borders."""
    text, other = data.draw(pieces(family)), data.draw(pieces(family))
    require_none(family, text)
    ids = said(family, text, system=other)
    harmless = said(family, HARMLESS, system=HARMLESS if other.strip() else other)
    assert controls_in(family, ids) == controls_in(family, harmless)
    documents = [Document(text, other, ()), Document(other, text, ())]
    ids = said(family, question_about(documents, text))
    assert controls_in(family, ids) == controls_in(family, said(family, HARMLESS))
