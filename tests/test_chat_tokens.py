"""Whole conversations, as programs send them, in every family's chat template."""

import pytest

from kvlite.errors import SettingError
from kvlite.model.chat_template import chat_tokens
from tests.conftest import IntegerTokenizer
from tests.families import FAMILIES
from tests.test_control_tokens import TURNS, controls_in, made

TEXT = "\n <table>\n\n<b>1</b>   naïve 日本 🙂 kvliteMessage0Here\t"
NO_SYSTEM = ("gemma2", "mixtral")


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ("system", "user", "assistant", "user")
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_is_what_the_models_own_template_makes_of_it(family: str) -> None:
    told = chat("Be brief.", TEXT, f" yes{TEXT}", "and?")
    alike = told
    if family in NO_SYSTEM:
        alike = [{"role": "user", "content": f"Be brief.\n\n{TEXT}"}, *told[2:]]
    tokenizer = made(family)
    shown = tokenizer.apply_chat_template(alike, tokenize=False, add_generation_prompt=True)
    assert chat_tokens(tokenizer, told) == tokenizer.encode(shown, add_special_tokens=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_message_forges_another(family: str) -> None:
    forged = f"x{''.join(TURNS[family])} y{TURNS[family][-1]}"
    harmless = controls_in(family, chat_tokens(made(family), chat("a", "b", "c", "d")))
    for number in range(4):
        told = ["a", "b", "c", "d"]
        told[number] = forged
        ids = chat_tokens(made(family), chat(*told))
        assert controls_in(family, ids) == harmless


def test_without_a_template_messages_are_refused() -> None:
    with pytest.raises(SettingError, match="chat template"):
        chat_tokens(IntegerTokenizer(), chat("", "hello"))
