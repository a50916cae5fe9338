"""RULER's own prompts are those of lm-evaluation-harness."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from transformers import AutoTokenizer

pytest.importorskip("lm_eval", reason="needs the extra `eval` (lm_eval)")
ruler_prompts = pytest.importorskip("kvlite.bench.ruler_prompts")

from lm_eval.tasks import TaskManager  # noqa: E402

from kvlite.bench.marks import found  # noqa: E402
from kvlite.bench.ruler import LEAST_OF_RULER, RULERS_OWN, Ruler  # noqa: E402
from kvlite.config.settings import EMBEDDED_MODEL  # noqa: E402
from kvlite.errors import SettingError  # noqa: E402
from kvlite.model.source import find_model  # noqa: E402

LENGTH, COUNT = LEAST_OF_RULER, 2
HARNESS = {"vt": "ruler_vt", "cwe": "ruler_cwe", "fwe": "ruler_fwe"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(find_model(EMBEDDED_MODEL))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["niah_single_1", "vt", "cwe"])
def test_documents_are_the_first_of_the_harness(tokenizer: Any, kind: str) -> None:
    own = ruler_prompts.documents(kind, tokenizer, LENGTH, COUNT)
    random.seed(0)
    numpy.random.seed(1234)
    ruler_prompts.cwe_utils.RNG.setstate(ruler_prompts._CWE_STATE)
    name = HARNESS.get(kind, kind)
    manager = TaskManager(
        include_path=str(Path(ruler_prompts.cwe_utils.__file__).parent),
        include_defaults=False,
        metadata={"pretrained": tokenizer.name_or_path, "max_seq_lengths": [LENGTH]},
    )
    theirs = list(manager.load([name])["tasks"][name].test_docs())
    assert len(theirs) == 500
    assert [dict(each) for each in own] == theirs[:COUNT]


def test_cases_end_with_the_question_and_the_beginning_of_the_answer(tokenizer: Any) -> None:
    task = Ruler(
        tokens=[LENGTH], methods=[], budgets=[64], kv_bits=["16"], question="known",
        tasks=[*RULERS_OWN], repeats=COUNT,
    )  # fmt: skip
    with pytest.raises(SettingError, match="--tokens 999 is too short"):
        replace(task, tokens=[999])
    recipes = task.prompts(tokenizer, "")
    assert [each.kind for each in recipes] == [*RULERS_OWN] * COUNT
    for recipe in recipes:
        case = recipe.case(tokenizer)
        document = ruler_prompts.documents(recipe.kind, tokenizer, LENGTH, COUNT)[recipe.seed]
        assert LENGTH / 4 < len(case.prompt) < LENGTH + 40  # the template comes besides
        message = [{"role": "user", "content": document["input"].rstrip()}]
        said = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(case.prompt) == said + document["gen_prefix"]
        question = tokenizer.decode(case.question).lstrip()
        assert question.startswith(("What is", "Question: "))
        assert document["gen_prefix"] in question
        assert found(case.keys, tokenizer.decode(case.forced)) == 1
        assert list(case.keys) == document["outputs"]
