"""What a response is made of, whole and streamed."""

from kvlite.model.answers.reader import Part
from kvlite.server.response_items import items_of


def test_items_of_a_response_are_in_the_order_in_which_they_came() -> None:
    call = Part("name", "weather"), Part("arguments", "{"), Part("arguments", "}")
    parts = Part("reasoning", "Hm"), Part("text", "Let "), Part("text", "me."), *call, *call
    items = items_of([*parts, Part("text", "So.")])
    calls = ["function_call"] * 2
    assert [each["type"] for each in items] == ["reasoning", "message", *calls, "message"]
    assert [each["content"][0]["text"] for each in (items[1], items[-1])] == ["Let me.", "So."]
    assert all(each["arguments"] == "{}" for each in items[2:4])
    assert [each["type"] for each in items_of([])] == ["message"]
    assert [each["type"] for each in items_of([Part("reasoning", "Hm")])] == [
        "reasoning",
        "message",
    ]
