"""What tells the ways a conversation went apart."""

from kvlite.conversation.record import told_apart


def test_ways_are_called_by_what_differs() -> None:
    assert told_apart(["Name a town.", "And  a\nriver?"], ["Rome.", ""]) == [
        "Name a town.",
        "And a river?",
    ]
    assert told_apart(["Again?", "Again?", "Once."], ["Yes.", "No.", ""]) == [
        "Again? → Yes.",
        "Again? → No.",
        "Once.",
    ]
    assert told_apart(["Again?", "Again?"], ["Yes.", "Yes."]) == [
        "1. Again? → Yes.",
        "2. Again? → Yes.",
    ]


def test_ways_with_long_messages_have_short_names() -> None:
    (one, other) = told_apart(["word " * 100] * 2, ["one " * 100, "other " * 100])
    assert one != other and max(len(one), len(other)) < 110
