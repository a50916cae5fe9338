"""Prompts of question tasks: what is hidden is there, once, where it should be, and repeatable."""

import re
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvlite.bench.case import Case, Recipe, require_fit
from kvlite.bench.niah import Niah
from kvlite.bench.options import KINDS as NEEDLES
from kvlite.bench.prose import bundled_prose
from kvlite.bench.ruler import COMMON, RARE_TIMES, Ruler
from kvlite.config.settings import EMBEDDED_MODEL
from kvlite.errors import SettingError
from kvlite.model.chat_template import said_tokens
from kvlite.model.source import find_model

GRID: dict[str, Any] = {"methods": [], "budgets": [64], "kv_bits": ["16"], "question": "known"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(find_model(EMBEDDED_MODEL))


Cases = list[tuple[Recipe, Case]]


@pytest.fixture(scope="module")
def cases(tokenizer: Any) -> Cases:
    niah = Niah(tokens=[900], depths=4, repeats=2, **GRID)
    ruler = Ruler(tokens=[900], repeats=2, **GRID)
    prose = bundled_prose()
    recipes = [*niah.prompts(tokenizer, prose), *ruler.prompts(tokenizer, prose)]
    return [(recipe, recipe.case(tokenizer)) for recipe in recipes]


def of(cases: Cases, kind: str) -> list[Case]:
    chosen = [case for recipe, case in cases if recipe.kind == kind]
    assert chosen
    return chosen


def test_prompts_fill_their_length_and_are_repeatable(tokenizer: Any, cases: Cases) -> None:
    for recipe, case in cases:
        assert recipe.length - 50 < len(case.prompt) <= recipe.length, recipe.kind
    assert [recipe.case(tokenizer) for recipe, _ in cases[::9]] == [case for _, case in cases[::9]]
    assert len({tuple(case.prompt) for _, case in cases}) == len(cases)


def test_a_prompt_is_what_a_conversation_reads(tokenizer: Any, cases: Cases) -> None:
    """Both settings read these tokens: at once, or cut where the question begins."""
    for _, case in cases:
        text = tokenizer.decode(case.prompt)
        message = re.search(r"<\|im_start\|>user\n(.*)<\|im_end\|>\n<\|im_start\|>ass", text, re.S)
        assert message is not None
        assert said_tokens(tokenizer, message[1], opening=True, first=True) == case.prompt
        asked = tokenizer.decode(case.question)
        assert re.match(r"\s*(What|Find)", asked)
        assert asked.endswith("<|im_start|>assistant\n")
        assert not re.search(r"What (is|are)|Find all", tokenizer.decode(case.context))


def test_a_needle_is_there_once_at_its_depth(tokenizer: Any, cases: Cases) -> None:
    for recipe, case in [each for each in cases if each[0].kind in NEEDLES]:
        context = tokenizer.decode(case.context)
        assert recipe.depth is not None
        (key,) = case.keys
        assert context.count(case.words) == context.count(key) == 1
        assert key not in tokenizer.decode(case.question)
        begin = context.index("<|im_start|>user\n") + len("<|im_start|>user\n")
        room = len(context) - begin - len(case.words)
        assert (context.index(case.words) - begin) / room == pytest.approx(recipe.depth, abs=0.12)


@pytest.mark.parametrize(
    ("kind", "said", "wanted", "asked"),
    [
        ("single", 1, 1, 1),
        ("multi-key", 4, 1, 1),
        ("multi-value", 4, 4, 1),
        ("multi-query", 4, 4, 4),
        ("copy-many", 8, 8, 8),
    ],
)
def test_magic_numbers(
    tokenizer: Any, cases: Cases, kind: str, said: int, wanted: int, asked: int
) -> None:
    for case in of(cases, kind):
        context, question = tokenizer.decode(case.context), tokenizer.decode(case.question)
        found = re.findall(r"magic numbers for (\w+ \w+) is: (\d{7})\.", context)
        about = [name for name in dict(found) if name in question]
        assert (len(found), len(case.keys), len(about)) == (said, wanted, asked)
        assert sorted(case.keys) == sorted(number for name, number in found if name in about)


def test_variables_are_a_chain(tokenizer: Any, cases: Cases) -> None:
    for case in of(cases, "variables"):
        links = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", tokenizer.decode(case.context))
        value = re.search(r"the value (\d+) in", tokenizer.decode(case.question))
        assert value is not None
        assert [name for name, _ in links] == list(case.keys)
        assert [held for _, held in links] == [value[1], *case.keys[:-1]]


def test_common_words_are_the_most_common(tokenizer: Any, cases: Cases) -> None:
    for case in of(cases, "words"):
        listed = re.findall(r"\d+\. ([a-z]+)", tokenizer.decode(case.context))
        counts = {word: listed.count(word) for word in listed}
        most = sorted(counts, key=lambda word: -counts[word])
        assert set(most[:COMMON]) == set(case.keys)
        assert counts[most[COMMON]] <= RARE_TIMES < counts[most[COMMON - 1]]


def test_forced_tokens_are_the_words_up_to_the_last_key(tokenizer: Any, cases: Cases) -> None:
    for _, case in cases:
        said = tokenizer.decode(case.forced)
        assert case.words.startswith(said)
        assert said.endswith(case.keys[-1])
        marked = "".join(tokenizer.decode([case.forced[at]]) for at in case.at_keys)
        assert re.sub(r"\s", "", marked) == re.sub(r"\s", "", "".join(case.keys))
        assert case.new_tokens > len(case.forced)


def test_too_short_is_refused(tokenizer: Any) -> None:
    niah = Niah(tokens=[400, 100], kinds=["pairs"], depths=1, repeats=1, **GRID)
    require_fit(niah.prompts(tokenizer, bundled_prose()), tokenizer)
    ruler = Ruler(tokens=[400, 100], tasks=["multi-query"], repeats=1, **GRID)
    with pytest.raises(SettingError, match=r"--tokens 100 is too short for ruler multi-query: "):
        require_fit(ruler.prompts(tokenizer, bundled_prose()), tokenizer)
