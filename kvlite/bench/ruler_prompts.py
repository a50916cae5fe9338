"""RULER's own prompts, of the six tasks that need no data, as lm-evaluation-harness makes them.

Source: "RULER: What's the Real Context Size of Your Long-Context Language Models?" and
lm_eval/tasks/ruler; the beginning of the answer is given, as there.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import lru_cache, partial
from io import StringIO
from typing import Any

import numpy
from lm_eval.tasks.ruler import cwe_utils, fwe_utils, vt_utils
from lm_eval.tasks.ruler.niah_utils import TEMPLATE
from lm_eval.tasks.ruler.prepare_niah import generate_samples, get_haystack

from kvlite.bench.case import Case, answer_tokens, begun_alike, first_message, forced_answer

# With which lm_eval begins.
_SEED, _NUMPY_SEED, _CWE_STATE = 0, 1234, cwe_utils.RNG.getstate()

Document = Mapping[str, Any]


def _needles(
    haystack: str, keys: str, values: str, *, tokenizer: Any, **sizes: int
) -> list[Document]:
    made: list[Document] = generate_samples(
        get_haystack(type_haystack=haystack),
        TOKENIZER=tokenizer,
        template=TEMPLATE,
        type_haystack=haystack,
        type_needle_k=keys,
        type_needle_v=values,
        **sizes,
    )
    return made


def _variables(*, tokenizer: Any, max_seq_length: int, num_samples: int) -> list[Document]:
    make = partial(vt_utils.sys_vartrack_w_noise_random, tokenizer=tokenizer)
    (example,) = make(num_samples=1, max_seq_length=500, incremental=5)
    made: list[Document] = make(
        num_samples=num_samples, max_seq_length=max_seq_length, icl_example=example
    )
    return made


# What makes prompts, and the longest answer, in tokens.
_TASKS: dict[str, tuple[Callable[..., list[Document]], int]] = {
    "niah_single_1": (partial(_needles, "repeat", "words", "numbers"), 128),
    "niah_multikey_2": (partial(_needles, "needle", "words", "numbers"), 128),
    "niah_multikey_3": (partial(_needles, "needle", "uuids", "uuids"), 128),
    "vt": (_variables, 30),
    "cwe": (cwe_utils.sys_word_pair_random, 120),
    "fwe": (fwe_utils.sys_kwext, 50),
}


@lru_cache(maxsize=16)
def documents(kind: str, tokenizer: Any, length: int, count: int) -> Sequence[Document]:
    """The first prompts that lm_eval makes.

    Args:
        length: tokens of a prompt and its answer, as RULER counts them.
        count: how many.
    """
    random.seed(_SEED)
    numpy.random.seed(_NUMPY_SEED)
    cwe_utils.RNG.setstate(_CWE_STATE)
    make, _ = _TASKS[kind]
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        return make(tokenizer=tokenizer, max_seq_length=length, num_samples=count)


def case(count: int, kind: str, length: int, seed: int, tokenizer: Any) -> Case:
    """One of the first `count` prompts, as a message in the chat template if there is one."""
    document = documents(kind, tokenizer, length, count)[seed]
    text, begins = document["input"].rstrip(), document["gen_prefix"]
    context, _, _ = text.rpartition("\n")
    if tokenizer.chat_template is None:
        ids = first_message(tokenizer, f"{text} {begins}")
    else:
        ids = first_message(tokenizer, text)
        ids += tokenizer.encode(begins, add_special_tokens=False)
    asked = begun_alike(ids, first_message(tokenizer, f"{context}\n"))
    keys = tuple(document["outputs"])
    listed = (f"{at}. {key}" for at, key in enumerate(keys, 1)) if kind == "cwe" else keys
    words = " " + " ".join(listed)
    forced, at_keys = forced_answer(tokenizer, words, keys)
    _, longest = _TASKS[kind]
    return Case(
        context=tuple(ids[:asked]),
        question=tuple(ids[asked:]),
        keys=keys,
        words=words,
        forced=tuple(forced),
        at_keys=tuple(at_keys),
        new_tokens=min(longest, answer_tokens(len(forced))),
    )
