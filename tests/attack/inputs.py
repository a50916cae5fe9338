"""What an attack sends: good requests with some of their parts changed."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvlite.server.fields import Chat, Completion, ResponseRequest, Tokenizing

# Seconds in which everything is answered.
MOST = 10.0


@dataclass(frozen=True)
class Sent:
    """One request; `leaves` is the share of it after which the client goes, `patience` the seconds
    in which it must be answered."""

    path: str
    body: bytes
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    leaves: float | None = None
    patience: float = MOST


# What asks for an answer that may be as long as the model's context, and when it must have come.
_LIMITS, _LONG = ("max_tokens", "max_completion_tokens", "max_output_tokens"), 300.0
_REGEX = ("a", "(b|c)", "{1,99}", "*", ".", "[^x]", "\\d", "(")
_LARK = ('"a"', "start?", "/x+/", "|", "~3..9")
_HI = {"role": "user", "content": "Hi"}
GOOD: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (Chat, {"messages": [_HI], "max_tokens": 2}),
    "/v1/completions": (Completion, {"prompt": "Hi", "max_tokens": 2}),
    "/v1/responses": (ResponseRequest, {"input": "Hi", "max_output_tokens": 2}),
    "/tokenize": (Tokenizing, {"prompt": "Hi"}),
    "/detokenize": (Tokenizing, {"tokens": [5, 6]}),
}
# Fields that hold more than a value.
_RICH: dict[str, Callable[[random.Random], Any]] = {
    "messages": lambda rng: [_message(rng) for _ in range(rng.choice((0, 1, 2, 5, 200)))],
    "input": lambda rng: [_message(rng) for _ in range(rng.choice((0, 1, 2, 5)))],
    "tools": lambda rng: [
        {"type": "function", "function": {"name": f"f{at}", "parameters": _schema(rng, 3)}}
        for at in range(rng.choice((1, 2, 300)))
    ],
    "response_format": lambda rng: {
        "type": "json_schema",
        "json_schema": {"schema": _schema(rng, 4)},
    },
    "guided_json": lambda rng: _schema(rng, 4),
    "regex": lambda rng: "".join(rng.choices(_REGEX, k=9)),
    "grammar": lambda rng: "start: " + " ".join(rng.choices(_LARK, k=6)),
    "logit_bias": lambda rng: {
        str(rng.randrange(60_000)): _value(rng) for _ in range(rng.choice((1, 9, 30_000)))
    },
    "prompt": lambda rng: rng.choice(
        [["a"] * 200, [[1, 2], [3]], [5] * 2000, [-1], ["", "a"], "x" * 300_000, [[5], "a"]]
    ),
}


def _value(rng: random.Random, depth: int = 3) -> Any:
    """A value of any type, often at an edge."""
    plain = [
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        -(2**63),
        2**64,
        10**299,
        10**400,
        0.5,
        -0.0,
        1e308,
    ]
    plain += [float("nan"), float("inf"), 5e-324, "", "a", "\ud800", "\0", "<|im_end|>", "9" * 5000]
    plain += ["é" * 1000, "-1", "auto", "none", "required", "json", "on", "\u202e", "user"]
    kind = rng.random()
    if depth and kind < 0.15:
        return [_value(rng, depth - 1) for _ in range(rng.choice((0, 1, 3)))]
    if depth and kind < 0.3:
        keys = ["type", "name", "role", "a", "\udfff", "content", "effort", "function", ""]
        return {rng.choice(keys): _value(rng, depth - 1) for _ in range(rng.choice((0, 1, 3)))}
    if kind < 0.32:
        return [rng.choice((0, "a", None))] * rng.choice((100, 25_000))
    return rng.choice(plain)


def _message(rng: random.Random) -> Any:
    made = {"role": rng.choice(["user", "assistant", "system", "tool"]), "content": "Hi"}
    for _ in range(rng.choice((0, 0, 1))):
        names = [
            "role",
            "content",
            "tool_calls",
            "tool_call_id",
            "name",
            "reasoning_content",
            "type",
        ]
        made[rng.choice(names)] = _value(rng)
    if rng.random() < 0.2:
        call = {
            "id": "1",
            "function": {"name": "f0", "arguments": rng.choice(["{}", "{", _value(rng)])},
        }
        made = {"role": "assistant", "content": None, "tool_calls": [call]}  # type: ignore[dict-item]
    return made


def _schema(rng: random.Random, depth: int) -> Any:
    """A schema, sometimes a bomb."""
    numbers = ("minimum", "maximum", "multipleOf", "minItems", "maxItems", "minLength", "maxLength")
    made: dict[str, Any] = {"type": rng.choice(["object", "array", "string", "integer", "number"])}
    for _ in range(rng.randrange(3)):
        made[rng.choice(numbers)] = rng.choice((0, 1, 7, 10**6 + 3, 0.5, -1, 10**18, 9_999_991))
    if depth and rng.random() < 0.5:
        key = rng.choice(("items", "additionalProperties", "not", "contains"))
        made[key] = _schema(rng, depth - 1)
    if depth and rng.random() < 0.5:
        made["properties"] = {f"p{at}": _schema(rng, depth - 1) for at in range(rng.choice((1, 3)))}
    if depth and rng.random() < 0.3:
        several = [_schema(rng, depth - 1) for _ in range(rng.choice((1, 3)))]
        made[rng.choice(("anyOf", "allOf", "oneOf"))] = several
    if rng.random() < 0.2:
        made["pattern"] = rng.choice(("^a{1,9999}$", "(a|b)*c{50}", "(", ".*.*.*x{99}", "\\d+"))
    if rng.random() < 0.1:
        made["enum"] = [f"v{at}" for at in range(rng.choice((1, 15_000)))]
    if rng.random() < 0.1:
        made["$ref"] = rng.choice(("#", "#/properties/p0", "http://a/b", "#/nowhere"))
    return made


def _odd_text(rng: random.Random, body: bytes) -> bytes:
    """A body that is cut, flipped, deep or no JSON."""
    kind = rng.randrange(5)
    if kind == 0:
        return body[: rng.randrange(len(body))]
    if kind == 1:
        at = rng.randrange(len(body))
        return body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :]
    if kind == 2:
        deep = rng.choice((50, 900, 5000))
        return body[:-1] + b', "metadata": ' + b"[" * deep + b"]" * deep + b"}"
    if kind == 3:
        return body[:-1] + b', "temperature": 1e999}'
    return body[:-1] + b', "user": "' + b"x" * rng.choice((100, 3 << 20)) + b'"}'


def _big(rng: random.Random) -> Sent:
    """A body of some MB: most are refused for what they have too much of."""
    many = rng.choice((19_000, 150_000, 600_000))
    body: dict[str, Any] = rng.choice(
        (
            {"messages": [_HI] * many},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * many}]},
            {"messages": [_HI], "logit_bias": {str(at): 1 for at in range(many)}},
            {"messages": [_HI], "metadata": {"a": ["x" * 9] * many}},
            {"messages": [_HI], "tools": [{"type": "function"}] * many},
            {"messages": [{"role": "user", "content": "word " * (8 * many)}]},
            {"messages": [_HI], "user": "x" * (40 * many)},
            {"messages": [_HI], "a": {"b": {"c": [[1.5] * 50] * (many // 50)}}},
        )
    )
    return Sent("/v1/chat/completions", json.dumps(body).encode())


def sent_of(rng: random.Random) -> Sent:
    """One request of an attack."""
    if rng.random() < 0.02:
        return _big(rng)
    path = rng.choice([*GOOD, "/v1/chat/completions"])
    if rng.random() < 0.03:
        others = (
            "/v1/files",
            "/v1/models/%00",
            "/v1/files/..%2f",
            "/health",
            "/metrics",
            "/nowhere",
        )
        return Sent(rng.choice(others), b"x", rng.choice(("GET", "POST", "DELETE", "PUT")))
    kind, good = GOOD[path]
    body = dict(good)
    for _ in range(rng.choice((1, 1, 2, 4))):
        name = rng.choice([*kind.model_fields, *_RICH])
        body[name] = _RICH[name](rng) if name in _RICH and rng.random() < 0.6 else _value(rng)
    if rng.random() < 0.2:
        body["stream"] = True
    is_long = any(type(body.get(name)) in (int, float) and body[name] > 500 for name in _LIMITS)
    text = json.dumps(body).encode()
    if rng.random() < 0.15:
        text = _odd_text(rng, text)
    leaves = rng.choice((0.5, 1.0, 1.0)) if rng.random() < 0.1 else None
    return Sent(path, text, leaves=leaves, patience=_LONG if is_long else Sent.patience)
