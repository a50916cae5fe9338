"""kvlite's reading of GGUF files, against transformers on the original models and llama.cpp."""

from collections.abc import Iterator

import pytest

import kvlite
from kvlite.errors import ModelError
from tests.judges.cases import ALL
from tests.judges.kvlite_side import ask_kvlite
from tests.judges.make import Judged, agreeing, furthest
from tests.judges.tiny import ANSWER


def _params() -> Iterator[object]:
    """`make long` runs one case of each architecture, `make judges` all."""
    kinds = set()
    for case in ALL.values():
        marks = [pytest.mark.long]
        if case.kind in kinds:
            marks.append(pytest.mark.exhaustive)
        kinds.add(case.kind)
        yield pytest.param(Judged(case), id=case.name, marks=marks)


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("judged", _params())
def test_a_file_is_read_as_transformers_and_llama_cpp_read_it(judged: Judged) -> None:
    case, expected, reply = judged.case, judged.expected, judged.llama_cpp
    assert not judged.why_not, "the converter refuses it"
    if case.refused:
        with pytest.raises(ModelError, match=case.refused):
            kvlite.load(str(judged.file))
        return
    answered = ask_kvlite(judged.file, expected.ids)
    mine = answered.log_probabilities
    assert answered.tokens == expected.tokens
    assert abs(mine - expected.log_probabilities).max() < case.rounding
    if case.llama_cpp == "agrees":
        assert reply is not None, "llama.cpp does not load it"
        assert furthest(mine, reply) < case.tolerance


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("judged", _params())
def test_the_judges_agree_where_the_case_says_so(judged: Judged) -> None:
    case, expected, reply = judged.case, judged.expected, judged.llama_cpp
    assert expected.clear
    if case.llama_cpp == "refuses":
        assert reply is None
        return
    assert reply is not None, "llama.cpp does not load it"
    difference = furthest(expected.log_probabilities, reply)
    if case.llama_cpp == "differs":
        assert difference > 10 * case.tolerance
    else:
        assert difference < case.tolerance
        assert agreeing(expected.tokens, reply.tokens) == ANSWER
