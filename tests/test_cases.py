"""Prompts of question tasks: what is hidden is there, once, where it should be, and repeatable."""

import re
from functools import partial
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvlite.bench.case import Case, Recipe, require_fit
from kvlite.bench.niah import KINDS as NEEDLES
from kvlite.bench.niah import niah_cases
from kvlite.bench.prose import begun_elsewhere, bundled_prose, hidden_in
from kvlite.bench.ruler import COMMON, RARE_TIMES, ruler_cases
from kvlite.bench.ruler import KINDS as TASKS
from kvlite.bench.words import names, numbers
from kvlite.config.settings import EMBEDDED_MODEL
from kvlite.errors import SettingError
from kvlite.model.chat_template import said_tokens
from kvlite.model.source import find_model

DEPTHS = [0.0, 0.3, 0.5, 1.0]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(find_model(EMBEDDED_MODEL))


@pytest.fixture(scope="module")
def needles(tokenizer: Any) -> list[Recipe]:
    return partial(
        niah_cases, tokenizer, bundled_prose(), lengths=[900], kinds=NEEDLES, depths=DEPTHS
    )(repeats=2)


@pytest.fixture(scope="module")
def tasks(tokenizer: Any) -> list[Recipe]:
    return ruler_cases(tokenizer, bundled_prose(), lengths=[900], kinds=list(TASKS), repeats=2)


@pytest.fixture(scope="module")
def cases(tokenizer: Any, needles: list[Recipe], tasks: list[Recipe]) -> list[Case]:
    return [recipe.case(tokenizer) for recipe in [*needles, *tasks]]


def of(cases: list[Case], kind: str) -> list[Case]:
    chosen = [case for case in cases if case.kind == kind]
    assert chosen
    return chosen


@pytest.mark.long
def test_prompts_fill_their_length_and_no_more(cases: list[Case]) -> None:
    for case in cases:
        assert case.length - 50 < len(case.prompt) <= case.length, case.kind


def test_a_prompt_is_what_a_conversation_reads(tokenizer: Any, cases: list[Case]) -> None:
    """Both settings read these tokens: at once, or cut where the question begins."""
    for case in cases:
        text = tokenizer.decode(case.prompt)
        message = re.search(r"<\|im_start\|>user\n(.*)<\|im_end\|>\n<\|im_start\|>ass", text, re.S)
        assert message is not None
        assert said_tokens(tokenizer, message[1], opening=True, first=True) == case.prompt
        asked = tokenizer.decode(case.question)
        assert re.match(r"\s*(What|Find)", asked)
        assert asked.endswith("<|im_start|>assistant\n")
        assert not re.search(r"What (is|are)|Find all", tokenizer.decode(case.context))


def test_a_needle_is_there_once_at_its_depth(tokenizer: Any, cases: list[Case]) -> None:
    for case in [each for kind in NEEDLES for each in of(cases, kind)]:
        context = tokenizer.decode(case.context)
        assert case.depth is not None
        (key,) = case.keys
        assert context.count(case.words) == context.count(key) == 1
        assert key not in tokenizer.decode(case.question)
        begin = context.index("<|im_start|>user\n") + len("<|im_start|>user\n")
        room = len(context) - begin - len(case.words)
        assert (context.index(case.words) - begin) / room == pytest.approx(case.depth, abs=0.12)


@pytest.mark.long
def test_seeds_make_other_prompts_and_the_same_again(
    tokenizer: Any, needles: list[Recipe], tasks: list[Recipe], cases: list[Case]
) -> None:
    assert [recipe.case(tokenizer) for recipe in [*needles, *tasks]][::3] == cases[::3]
    prompts = {tuple(case.prompt) for case in cases}
    assert len(prompts) == len(cases)
    keys = [case.keys for case in cases if case.kind != "sentence"]
    assert len(set(keys)) == len(keys)


def test_pairs_have_one_question_and_many_answers(tokenizer: Any, cases: list[Case]) -> None:
    for case in of(cases, "pairs"):
        context = tokenizer.decode(case.context)
        pairs = dict(re.findall(r"The code of the (\w+ \w+) is (\d{7})\.", context))
        assert len(pairs) == len(set(pairs.values())) == 10
        asked = re.search(r"the code of the (\w+ \w+)\?", tokenizer.decode(case.question))
        assert asked is not None
        assert (pairs[asked[1]],) == case.keys


@pytest.mark.parametrize(
    ("kind", "said", "wanted", "asked"),
    [
        ("single", 1, 1, 1),
        ("multi-key", 4, 1, 1),
        ("multi-value", 4, 4, 1),
        ("multi-query", 4, 4, 4),
    ],
)
def test_magic_numbers(
    tokenizer: Any, cases: list[Case], kind: str, said: int, wanted: int, asked: int
) -> None:
    for case in of(cases, kind):
        context, question = tokenizer.decode(case.context), tokenizer.decode(case.question)
        found = re.findall(r"magic numbers for (\w+ \w+) is: (\d{7})\.", context)
        about = [name for name in dict(found) if name in question]
        assert (len(found), len(case.keys), len(about)) == (said, wanted, asked)
        assert sorted(case.keys) == sorted(number for name, number in found if name in about)


def test_variables_are_a_chain(tokenizer: Any, cases: list[Case]) -> None:
    for case in of(cases, "variables"):
        links = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", tokenizer.decode(case.context))
        value = re.search(r"the value (\d+) in", tokenizer.decode(case.question))
        assert value is not None
        assert [name for name, _ in links] == list(case.keys)
        assert [held for _, held in links] == [value[1], *case.keys[:-1]]


def test_common_words_are_the_most_common(tokenizer: Any, cases: list[Case]) -> None:
    for case in of(cases, "words"):
        listed = re.findall(r"\d+\. ([a-z]+)", tokenizer.decode(case.context))
        counts = {word: listed.count(word) for word in listed}
        most = sorted(counts, key=lambda word: -counts[word])
        assert set(most[:COMMON]) == set(case.keys)
        assert counts[most[COMMON]] <= RARE_TIMES < counts[most[COMMON - 1]]


def test_forced_tokens_are_the_words_up_to_the_last_key(tokenizer: Any, cases: list[Case]) -> None:
    for case in cases:
        said = tokenizer.decode(case.forced)
        assert case.words.startswith(said)
        assert said.endswith(case.keys[-1])
        marked = "".join(tokenizer.decode([case.forced[at]]) for at in case.at_keys)
        assert re.sub(r"\s", "", marked) == re.sub(r"\s", "", "".join(case.keys))
        assert case.new_tokens > len(case.forced)


def test_too_short_is_refused(tokenizer: Any) -> None:
    recipes = niah_cases(
        tokenizer, bundled_prose(), lengths=[400, 100], kinds=["pairs"], depths=[0], repeats=1
    )
    require_fit(recipes, tokenizer)
    recipes = ruler_cases(
        tokenizer, bundled_prose(), lengths=[400, 100], kinds=["multi-query"], repeats=1
    )
    with pytest.raises(SettingError, match=r"--tokens 100 is too short for ruler multi-query: "):
        require_fit(recipes, tokenizer)


def test_hiding() -> None:
    text = "One. Two. Three. "
    assert hidden_in(text, [(0.0, "A."), (0.3, "B."), (0.3, "C."), (1.0, "D.")]) == (
        "A. One. B. C. Two. Three. D. "
    )
    assert begun_elsewhere(text, 0) == text
    turned = {begun_elsewhere(text, seed) for seed in range(1, 30)}
    assert turned == {text, "Two. Three.\n\nOne. ", "Three.\n\nOne. Two. "}


def test_names_and_numbers_do_not_repeat() -> None:
    from random import Random

    for drawn in (names(Random(0), 1001), numbers(Random(0), 1001)):
        assert len(set(drawn)) == 1001
    assert not [name for name in names(Random(1), 1001) if name in bundled_prose()]
