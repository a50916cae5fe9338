"""Chat templates, which are strangers' programs: a sandbox with what transformers, vLLM and
llama.cpp offer them. What a template is given are copies, so that it may change them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

from kvlite.config.checked_file import from_json
from kvlite.errors import ChatTemplateError, SettingError, reason

# Bytes of a template's file.
_LARGEST = 1 << 20
# What a template is given besides the variables of a request.
GIVEN = ("messages", "tools", "documents", "functions", "datetime", "add_generation_prompt")


class _Refused(TemplateError):
    """Raised by a template itself, in its own words."""


class _Generation(Extension):
    """`{% generation %}`, around answers, means nothing here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Dict:
    """`dict` without the attributes of a class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)


class _Names(Namespace):
    """A namespace without names that Python has for itself."""

    def __init__(*args: Any, **values: Any) -> None:  # `self` may be one of the names
        own, *given = args
        for name in (made := dict(*given, **values)):
            _require_plain(name)
        Namespace.__init__(own, made)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_plain(name)
        super().__setitem__(name, value)


def _require_plain(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace has no {name!r}")


def source_of(tokenizer: Any, tools: bool = False) -> str | None:
    """A tokenizer's chat template, the one for `tools` where there are several; None if it has
    none."""
    template: str | Mapping[str, str] | None = getattr(tokenizer, "chat_template", None)
    if template is None or isinstance(template, str):
        return template
    named = (template.get(name) for name in (("tool_use", "default") if tools else ("default",)))
    return next((each for each in named if each is not None), None)


def read_template(path: str) -> str:
    """The template in a file, "" for no file. Raises SettingError if there is none."""
    if not path:
        return ""
    file = Path(path).expanduser()
    try:
        if file.exists() and not (file.is_file() and file.stat().st_size <= _LARGEST):
            raise ValueError("it is no file of a template's size")
        source = file.read_text("utf-8-sig")
        if "{{" not in source:  # nor is any other file's text shown to the model
            raise TemplateError("it writes nothing that is said")
        _compiled(source)
    except (OSError, ValueError) as error:
        raise SettingError(f"--chat-template {path!r} cannot be read ({reason(error)})") from None
    except TemplateError as error:
        raise SettingError(
            f"--chat-template {path!r} is no Jinja template ({reason(error)})"
        ) from None
    return source


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """A conversation as a tokenizer's chat template writes it, given the request's variables such
    as `enable_thinking`. Raises ChatTemplateError if the template refuses the messages, or
    fails."""
    given: dict[str, Any] = {
        **getattr(tokenizer, "special_tokens_map", {}),
        **(variables or {}),
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    if tools:
        given["functions"] = _tojson(tools, indent=4)
    try:
        source = source_of(tokenizer, bool(tools))
        if source is None:
            raise ValueError("it has no default")
        try:
            return _rendered(source, messages, tools or None, given)
        except TypeError:
            if tools:
                raise
            return _rendered(source, messages, [], given)  # it counts them in any case
    except _Refused as error:
        said = " ".join(str(error).split()) or "it does not say why"
        raise ChatTemplateError(
            f"this model's chat template refuses these messages: {said}"
        ) from None
    except Exception as error:  # a stranger's template fails in any way
        raise ChatTemplateError(
            f"this model's chat template cannot be used ({reason(error)}): get the model again, or "
            "give another template by --chat-template"
        ) from error


def _rendered(source: str, messages: Any, tools: Any, given: Mapping[str, Any]) -> str:
    made = _compiled(source)
    return made.render(**given, messages=_copied(messages), tools=_copied(tools))


@lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    made = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters |= {"tojson": _tojson, "from_json": from_json, "fromjson": from_json}
    made.globals |= {
        "dict": _Dict(),
        "namespace": _Names,
        "raise_exception": _refuse,
        "strftime_now": _now,
        "datetime": _now("%Y-%m-%d"),
    }
    return made.from_string(source)


def _refuse(said: Any = "") -> None:
    raise _Refused(str(said))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: Jinja's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Iterator):
        return [*value]
    raise TypeError(f"{type(value).__name__} has no JSON")


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list | tuple) else value
