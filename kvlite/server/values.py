"""Values of requests as clients write them: 5.0 for 5, "" and [] for nothing."""

from typing import Annotated, Any

from pydantic import BeforeValidator


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _something(value: Any) -> Any:
    return None if value == "" else value


def _by_token(value: Any) -> Any:
    """Biases by token, which llama.cpp takes as pairs, too, with false for never."""
    pairs = isinstance(value, list) and all(isinstance(each, list) for each in value)
    if not pairs or not all(len(each) == 2 for each in value):
        return value
    return {str(token): -100.0 if bias is False else bias for token, bias in value}


Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number: JSON has no other kind of number than 5.0."""

# Fields that may be empty, which says nothing.
SOMETHING = BeforeValidator(_something)

Biases = Annotated[dict[str, float], BeforeValidator(_by_token)]
"""A bias for some tokens."""
