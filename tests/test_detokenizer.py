"""Streaming text: whole characters, no stop strings, nothing lost."""

from hypothesis import given, settings
from hypothesis import strategies as st

import kvlite
from kvlite.engine.detokenizer import AnswerText, TextStream


class Bytes:
    """A tokenizer of single bytes, so that characters span tokens."""

    def decode(self, ids: list[int], **_: object) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def stream(data: bytes, stops: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    text, pieces = TextStream(Bytes(), stops), []
    for byte in data:
        pieces.append(text.push(byte))
        if text.stopped:
            break
    pieces.append(text.flush())
    return pieces, text


@given(st.text())
@settings(deadline=None)
def test_pieces_join_to_the_text_and_never_split_a_character(text: str) -> None:
    pieces, _ = stream(text.encode())
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(st.text(alphabet="ab|é"), st.sampled_from(["ab", "a|b", "éa", "|||"]))
@settings(deadline=None)
def test_nothing_from_a_stop_string_on_is_ever_shown(text: str, stop: str) -> None:
    pieces, state = stream(text.encode(), (stop,))
    assert "".join(pieces) == text.split(stop)[0]
    assert state.stopped == (stop in text)


def test_the_earliest_of_several_stop_strings_ends_the_text() -> None:
    pieces, _ = stream(b"one two three", ("three", "two"))
    assert "".join(pieces) == "one "


def test_half_a_character_at_the_end_is_flushed() -> None:
    pieces, _ = stream("é".encode()[:1])
    assert pieces == ["", "\ufffd"]


def test_a_real_tokenizer_streams_what_it_would_decode_at_once(smollm: kvlite.Runner) -> None:
    text = "Zoë paid 3,50 € — 日本語 🙂 and left.\n\n  Indented."
    ids = smollm.tokenizer.encode(text)
    state = TextStream(smollm.tokenizer)
    pieces = [state.push(i) for i in ids] + [state.flush()]
    assert "".join(pieces) == smollm.tokenizer.decode(ids) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_stop_string_with_a_token_that_is_spelled_out_ends_an_answer() -> None:
    class Flagged(Bytes):
        """A tokenizer whose token 1 is special."""

        def decode(self, ids: list[int], **options: object) -> str:
            return super().decode([each for each in ids if each != 1])

    text = AnswerText(Flagged(), ("<t>",), {1: "<t>"})
    assert text.push(ord("a")) == ("a", "a") and not text.stopped
    text.push(1)
    assert text.stopped
