"""Errors as the clients of each API expect them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from kvlite.config.settings import OPTIONS, flag_of
from kvlite.errors import (
    ChatTemplateError,
    ContextError,
    DocumentError,
    KvliteError,
    OutOfMemory,
    SettingError,
    sentence,
)
from kvlite.server.config import OWN

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
# As Anthropic's clients know them.
_ANTHROPIC_KINDS = {
    **_KINDS,
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
# Errors of kvlite: status, field and code.
_STATUS: dict[type[KvliteError], tuple[int, str | None, str | None]] = {
    ChatTemplateError: (400, None, None),
    ContextError: (400, None, "context_length_exceeded"),
    DocumentError: (400, "file", None),
    OutOfMemory: (503, None, "out_of_memory"),
    SettingError: (400, None, None),
}


class Refusal(Exception):
    """Something that is answered with an error.

    Attributes:
        status: of HTTP.
        param: the field that is wrong, if it is one.
        code: what programs look at.
    """

    def __init__(
        self, message: str, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        kind = _KINDS.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        said = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": said}

    def body_at(self, path: str) -> dict[str, Any]:
        """The error in the shape of the API that an address is of."""
        if path.startswith("/v1/messages"):
            kind = _ANTHROPIC_KINDS.get(self.status, "invalid_request_error")
            is_long = self.code == "context_length_exceeded"
            said = f"prompt is too long: {self}" if is_long else str(self)
            return {"type": "error", "error": {"type": kind, "message": said}}
        return {"error": str(self)} if path.startswith("/api/") else self.body

    def response(self, path: str) -> JSONResponse:
        """The whole answer; clients try again later where that may help."""
        headers = {"Retry-After": "2"} if self.status in (429, 503) else {}
        return JSONResponse(self.body_at(path), self.status, headers)


# What a field has to be, by what pydantic calls the error.
_WANTED = {
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
}


def refusal_of_fields(error: ValidationError, plain: Mapping[str, Any]) -> Refusal:
    """What is wrong with the deepest field of a request that is not as it has to be."""
    errors = error.errors(include_url=False, include_input=False)
    paths = [_path(each["loc"], plain, each["type"] == "missing") for each in errors]
    deepest = max(paths, key=len)
    same = [each for each, path in zip(errors, paths, strict=True) if path == deepest]
    first = same[0]
    about = first.get("ctx", {})
    if first["type"] == "missing":
        said = "is missing"
    elif first["type"] == "literal_error":
        said = f"is not {about['expected']}".replace("'", "")
    elif first["type"] == "string_too_long":
        said = f"is longer than {about['max_length']:,} characters"
    else:
        wanted = dict.fromkeys(_WANTED.get(each["type"], "valid") for each in same)
        said = f"is not {' or '.join(wanted)}"
    name = deepest[0] + "".join(
        f"[{each}]" if isinstance(each, int) else f".{each}" for each in deepest[1:]
    )
    return Refusal(f"{name[:100]} {said}", param=str(deepest[0]))


def _path(loc: Sequence[int | str], plain: Any, missing: bool) -> tuple[Any, ...]:
    """Where an error is in a request: without pydantic's names of alternatives."""
    made, value = list[int | str](), plain
    for at, each in enumerate(loc):
        try:
            value = value[each]
        except (LookupError, TypeError):
            if not missing or at < len(loc) - 1:
                continue
        made.append(each)
    return tuple(made)


# What flags are in requests.
_FIELDS = {
    **{flag_of(name): f"kvlite.{name}" for name in OWN},
    **{
        flag_of(name): name
        for name, option in OPTIONS.items()
        if option.metadata["panel"] == "Answer" and name not in OWN
    },
    "--model": "model",
    "--max-tokens": "max_tokens",
    "--schema": "response_format",
}
# And to whoever sends them.
_SPOKEN = {flag_of(name): f"the server's {flag_of(name)}" for name in OPTIONS} | _FIELDS
_FLAG = re.compile("--[a-z]+(-[a-z]+)*")
# The field of a request's text, where it is not `messages`.
_TEXTS = {"/v1/completions": "prompt", "/v1/responses": "input", "/v1/files": "file"}


def in_fields(message: str) -> str:
    """A message that speaks of fields, not of flags, which nobody gave; settings that no request
    has are the server's."""
    return _FLAG.sub(lambda found: _SPOKEN.get(found[0], found[0]), message)


def refusal_of(error: Exception, path: str = "") -> Refusal:
    """What went wrong at an address as programs are told it; nothing of kvlite's own bugs."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, KvliteError):
        status, param, code = _STATUS.get(type(error), (500, None, None))
        if isinstance(error, ContextError | ChatTemplateError):
            param = _TEXTS.get(path, "messages")
        elif isinstance(error, SettingError) and (flag := _FLAG.search(str(error))):
            param = _FIELDS.get(flag[0], "").partition(".")[0] or None
        return Refusal(in_fields(sentence(error)), status, param, code)
    said = f"kvlite went wrong ({type(error).__name__}); the server's log has more"
    return Refusal(said, 500)
