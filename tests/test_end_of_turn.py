"""The token that ends a turn, and templates that fail, in whatever way."""

import copy
from typing import Any

import pytest

from kvlite.errors import KvliteError, ModelError
from kvlite.model.chat_template import chat_tokens, said_tokens
from kvlite.model.end_of_turn import end_of_turn
from tests.families import FAMILIES
from tests.test_control_tokens import TURNS, made

FAULTY = [
    "{% if %}",
    "{{ messages[0]['content'] + 1 }}",
    "{{ 1 // 0 }}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "{{ messages.nothing.at_all }}",
    "{{ raise_exception('no') }}",
    "{{ messages | nofilter }}",
    "{% for x in 5 %}{% endfor %}",
    "{{ range(10 ** 9) }}",
    "{{ ''.__class__.__mro__ }}",
]
ENDS = {"llama3": "<|eot_id|>", "phi3": "<|end|>", "mistral-v0.3": "</s>", "mixtral": "</s>"}
ENDS |= dict.fromkeys(("gemma2", "gemma3"), "<end_of_turn>")
ENDS |= dict.fromkeys(("qwen2", "qwen2.5", "qwen3", "smollm2"), "<|im_end|>")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_ends_as_the_template_writes_it(family: str) -> None:
    tokenizer = made(family)
    assert tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)) == ENDS[family]


def templated(template: str) -> Any:
    tokenizer = copy.copy(made("qwen2.5"))  # which others use, too
    tokenizer.chat_template = template
    return tokenizer


def test_a_turn_that_the_next_one_ends() -> None:
    begin = TURNS["qwen2.5"][0]
    template = "{% for m in messages %}" + begin + "{{ m.content }}{% endfor %}"
    assert templated(template).convert_ids_to_tokens(end_of_turn(templated(template))) in begin
    assert end_of_turn(templated("{% for m in messages %}{{ m.content }}\n{% endfor %}")) is None


@pytest.mark.parametrize("template", FAULTY)
def test_a_template_that_fails_is_a_sentence(template: str) -> None:
    tokenizer = templated(template)
    assert end_of_turn(tokenizer) is None
    told = [{"role": "user", "content": "hello"}]
    for opening in (True, False):
        with pytest.raises(ModelError, match=r"chat template (cannot be used|refuses)") as error:
            said_tokens(tokenizer, "hello", opening=opening, first=opening, system="be brief")
        assert "\n" not in str(error.value)
    with pytest.raises(KvliteError, match="chat template"):
        chat_tokens(tokenizer, told)
