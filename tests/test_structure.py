"""Punctuation and white space: which tokens they are, and what becomes of their scores."""

import string

import pytest
import torch

from kvlite.config.settings import Settings
from kvlite.conversation.conversation import Conversation
from kvlite.errors import SettingError
from kvlite.methods import LayerView, parse_method
from kvlite.methods.scored import Scored
from kvlite.model import structure
from kvlite.model.structure import structural
from tests.conftest import Tiny
from tests.test_methods import make_case

PROSE = (
    'The  cat sat.\n\n"Well," it said -- twice! (It\'s 7,5 + x_1…)\tÜber «où»? 猫、犬。 <|im_end|>'
)


class Letters:
    """A token for each character, of pieces of two where they are given."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


class Stripping(Letters):
    """It leaves out the space that a text begins with, as SentencePiece does."""

    def decode(self, token_ids: list[int]) -> str:
        return super().decode(token_ids).removeprefix(" ")

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return chr(token_id).replace(" ", "\u2581")


def test_structure_is_what_has_no_letter_digit_or_sign() -> None:
    marks = {*string.whitespace, *string.punctuation, *"«»…、。"} - {*"+<>|$^`~="}
    ids = torch.tensor([[*map(ord, PROSE)], [*map(ord, reversed(PROSE))]])
    expected = [[chr(each) in marks for each in row] for row in ids.tolist()]
    assert structural(Letters(), ids).tolist() == expected
    assert structural(Stripping(), ids).tolist() == expected
    assert not structural(Letters(), torch.tensor([[0xFFFD]])).any()
    assert structural(Letters(), ids.to("meta")).shape == ids.shape


@pytest.mark.parametrize("spec", ["snapkv:window=4", "keydiff", "tova:pool=3", "kvx:pool=5"])
@pytest.mark.parametrize("compressed", [False, True])
def test_scores_of_structure_are_taken_down_before_they_are_spread(
    spec: str, compressed: bool
) -> None:
    case = make_case(compressed=compressed, batch=2, rows=32, n=60)
    plain = parse_method(spec)
    lowered = parse_method(f"{spec}{',' if ':' in spec else ':'}structure=0.25")
    assert isinstance(plain, Scored) and isinstance(lowered, Scored) and lowered.needs_text
    end = int(case.positions.max()) + 1
    known = torch.rand(2, end, generator=torch.Generator().manual_seed(5)) < 0.5
    view = LayerView(0, case.layer.head_groups, case.window, 24, structural=known)
    heads = [each for head_group in case.layer.head_groups for each in head_group.heads]
    before, after = (torch.cat(method.scores(view), 1).double() for method in (plain, lowered))
    expected = before.clone()
    if not plain.heads_agree:
        for b in range(2):
            for row, head in enumerate(heads):
                for i in range(case.length):
                    if known[b, int(case.positions[b, head, i])]:
                        expected[b, row, i] *= 0.25
        torch.testing.assert_close(after, expected)
    nothing = LayerView(
        0, case.layer.head_groups, case.window, 24, structural=torch.zeros_like(known)
    )
    assert all(
        one.slots.equal(other.slots)
        for one, other in zip(plain.select(view), lowered.select(nothing), strict=True)
    )


@pytest.mark.parametrize("recall", ["off", "ram"])
def test_over_two_turns_no_structure_stays_but_at_the_ends(
    llama: Tiny, monkeypatch: pytest.MonkeyPatch, recall: str
) -> None:
    monkeypatch.setattr(structure, "_is_structure", lambda tokenizer, token_id: token_id % 3 == 0)
    torch.manual_seed(3)
    method = "snapkv:window=4,pool=1,structure=0"
    given = Settings(method=method, budget="30", recall=recall, recall_entries=0)
    talk = Conversation(llama.model, given)
    for count in (120, 60):
        talk.generate(torch.randint(3, 199, (count,)).tolist(), max_new_tokens=4, ignore_eos=True)
    read = len(talk.token_ids) - 4
    for layer in talk.cache.layers:
        (head_group,) = layer.head_groups
        for line in head_group.positions[0, :, :30].tolist():
            assert all(talk.token_ids[at] % 3 for at in line if at < read - 4)


def test_a_share_is_from_0_to_1() -> None:
    for wrong in ("1.5", "-0.1"):
        with pytest.raises(SettingError, match="from 0 to 1"):
            parse_method(f"snapkv:structure={wrong}")
