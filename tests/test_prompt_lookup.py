"""What is proposed, against going through everything; and how likely it is taken to be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlite.engine import prompt_lookup
from kvlite.engine.prompt_lookup import CHANCES, LONGEST, WEIGHT, PromptLookup
from tests.oracles.prompt_lookup import continued, match

TEXTS = st.lists(st.integers(0, 3), max_size=60)


@given(TEXTS, TEXTS, st.integers(0, 20))
def test_the_latest_of_the_longest_matches_is_gone_on_with(
    read: list[int], said: list[int], count: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_lookup, "PLACES", 1000)
        lookup = PromptLookup(read)
        for at in range(len(said) + 1):
            if at:
                lookup.push(said[at - 1])
            tokens = [*read, *said[:at]]
            length, follows = match(tokens, LONGEST)
            assert lookup.length == length
            expected = continued(tokens, follows, count) if follows else []
            assert lookup.proposed(count) == expected
            assert len(lookup.chances(count)) == len(expected)


@pytest.mark.long
@given(st.lists(st.integers(0, 1), min_size=20, max_size=60))
def test_with_few_places_compared_it_is_still_a_match(tokens: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_lookup, "PLACES", 2)
        lookup = PromptLookup(tokens)
    length, _ = match(tokens, LONGEST)
    assert 1 <= lookup.length <= length
    (first,) = lookup.proposed(1)
    ends = [tokens[: end + 1] for end in range(len(tokens)) if tokens[end] == first]
    assert any(end[-lookup.length - 1 : -1] == tokens[-lookup.length :] for end in ends)


def test_it_is_counted_how_often_what_was_expected_came() -> None:
    lookup = PromptLookup([1, 2, 3, 9, 1, 2])
    assert lookup.length == 2 and lookup.proposed(2) == [3, 9]
    assert lookup.chances(2) == [CHANCES[2], CHANCES[2] * CHANCES[3]]
    lookup.push(3)
    lookup.push(8)  # 9 was expected after three that match
    assert lookup.length == 0 and lookup.proposed(2) == [1, 2]  # as after the 3 before it
    assert lookup.chances(1) == [CHANCES[0]]
    for token in (1, 2):
        lookup.push(token)
    assert lookup.length == 2
    two = (CHANCES[2] * WEIGHT + 1) / (WEIGHT + 1)
    three = CHANCES[3] * WEIGHT / (WEIGHT + 1)
    assert lookup.chances(2) == pytest.approx([two, two * three])
