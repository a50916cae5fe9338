"""What requests say: fields of OpenAI's that mean something here, checked. Misspelled ones are
refused, others ignored."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, Field, ValidationError

from kvlite.config.settings import Settings, checked
from kvlite.errors import SettingError
from kvlite.methods.engine_config import require_meaning
from kvlite.server.config import OF_PROMPT, OWN
from kvlite.server.formats import Format, Formatted, format_of
from kvlite.server.messages import Fields, Message, Plain, text_of
from kvlite.server.refusals import Refusal, refusal_of_fields
from kvlite.server.response_input import Item, Shown, item_messages
from kvlite.server.thinking import Reasons
from kvlite.server.values import SOMETHING, Biases, Whole
from kvlite.web.server_api import FIELDS

# Settings that are fields of their own, as vLLM and llama.cpp call them too.
_SAMPLING = tuple(name for name in FIELDS if name not in ("max_new_tokens", "stop"))
# The most choices a request may ask for, and the most stop strings.
_CHOICES, _STOPS = 16, 16

_Model = TypeVar("_Model", bound=BaseModel)
_LONGEST_NAME = 1000
# How many fields without a meaning here are looked at, and how alike two names are of which one is
# the other, misspelled: `topp` is `top_p`, vLLM's `min_tokens` is not `max_tokens`.
_LOOKED_AT, _ALIKE = 100, 0.82
# Fields of other servers that are no misspelled ones.
_NOT_MEANT = frozenset({"parse_tool_calls", "mode", "models", "repetition_penalty_range"})
# Fields of other servers that a client may rely on, and what says it here.
_MEANT = {"n_predict": "max_tokens", "format": "response_format"}
# What clients send for the longest answer there may be, and for any of all tokens.
_ANY = -1
_NAME = re.compile("[A-Za-z0-9_.-]{1,40}")


class StreamOptions(Fields):
    """How an answer is streamed."""

    include_usage: bool | None = None


class Named(Fields):
    """A request that may name a model; `any_model` answers if it names another maker's."""

    any_model: ClassVar[bool] = False
    model: Annotated[Annotated[str, Field(max_length=_LONGEST_NAME)] | None, SOMETHING] = None


class Sampled(Named, Formatted):
    """Fields of every request for an answer."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    n: Whole | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: Whole | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    kvlite: dict[str, Any] | None = None

    @property
    def followed(self) -> Format | None:
        """What the answer must follow; errors are those of `format_of`."""
        return format_of(self, self.response_format, "response_format")

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with what it cost."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def length_field(self) -> str:
        """Which field says the most tokens of an answer."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def longest(self) -> int | None:
        """The most tokens of an answer; None if nothing is said, or it may be any number."""
        most: int | None = getattr(self, self.length_field)
        return None if most == _ANY else most

    @property
    def choices(self) -> int:
        """How many answers are wanted."""
        return 1 if self.n is None else self.n

    @property
    def documents(self) -> list[str]:
        """Documents that the first message is about: ids of uploads, or names in the library.
        Raises Refusal if they are no list of names."""
        names = (self.kvlite or {}).get("documents") or []
        if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
            raise Refusal("kvlite.documents is no list of names", param="kvlite")
        return names

    def settings(self, usual: Settings) -> dict[str, Any]:
        """The settings of this request that differ from the usual ones; an answer without tokens
        is one of a token that is left out. Raises Refusal if one is out of range, or not here."""
        if not 1 <= self.choices <= _CHOICES:
            raise Refusal(f"n {self.choices} is not between 1 and {_CHOICES}", param="n")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > _STOPS:
            raise Refusal(f"there are {len(stops)} stop strings: {_STOPS} at most", param="stop")
        found = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if found.get("seed", 0) < 0:  # clients that want any
            del found["seed"]
        if found.get("top_k") == _ANY:
            found["top_k"] = 0
        if self.longest is not None:
            found["max_new_tokens"] = self.longest or 1
        named = {"max_new_tokens": self.length_field}
        values = {
            name: checked_field(name, each, named.get(name, name)) for name, each in found.items()
        }
        if any(stops):
            values["stop"] = tuple(stops)
        if self.logit_bias:
            pairs = tuple(f"{token}:{bias}" for token, bias in self.logit_bias.items())
            values["logit_bias"] = checked_field("logit_bias", pairs, "logit_bias")
        if followed := self.followed:
            self.require_alone(followed)
            values["schema"] = _followed(followed)
        given = (self.kvlite or {}).items()
        own = {name: value for name, value in given if name not in OF_PROMPT}
        return values | _own(own, usual)

    def require_alone(self, followed: Format) -> None:
        """Raises Refusal if something else of the request does not go with what is to be
        followed."""


class Talk(Reasons):
    """Messages, and where the answer begins.

    Attributes:
        continue_final_message: whether the last one is the beginning of the answer; if it is left
            out, one of the assistant is.
    """

    messages: list[Message] | None = None
    chat_template: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def require_end(self) -> None:
        """Raises Refusal unless an answer can begin there, by the model's own template."""
        if self.chat_template:
            said = "chat_template is for whoever starts the server (--chat-template): leave it out"
            raise Refusal(said, param="chat_template")
        if self.continue_final_message and self.add_generation_prompt:
            said = "continue_final_message goes on with an answer, add_generation_prompt begins one"
            raise Refusal(f"{said}: leave one out", param="continue_final_message")
        if self.continue_final_message and not self.continues:
            said = "continue_final_message: the last message is no answer that could go on"
            raise Refusal(said, param="continue_final_message")
        if self.add_generation_prompt is False and self.messages and not self.continues:
            said = "add_generation_prompt: an answer begins with one unless it goes on with a last"
            raise Refusal(f"{said} message of the assistant", param="add_generation_prompt")

    @property
    def continues(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        last = self.messages[-1] if self.messages else None
        begun = last is not None and last.role == "assistant" and not last.tool_calls
        wanted = self.continue_final_message is not False and not self.add_generation_prompt
        return begun and wanted


class Asked(Sampled):
    """Fields of a request for the next message."""

    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    def require_alone(self, followed: Format) -> None:
        """As of any request."""
        if self.tools and self.tool_choice != "none" and not followed.is_json:
            said = "does not go with tools, beside which an answer can be JSON: leave one out"
            raise Refusal(f"{followed.field} {said}", param=followed.param)


class Chat(Talk, Asked):
    """A request for the next message of a chat."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    functions: list[Any] | None = None
    modalities: list[Any] | None = None

    def require_here(self) -> None:
        """Raises Refusal for what this server cannot do."""
        if self.functions:
            raise Refusal("functions is not supported: send tools", param="functions")
        if any(each != "text" for each in self.modalities or ()):
            raise Refusal("modalities: this server answers with text alone", param="modalities")
        self.require_end()

    def require_alone(self, followed: Format) -> None:
        """As of any request."""
        super().require_alone(followed)
        begun = self.messages[-1].content if self.continues else None
        if text_of(begun, "messages", "messages").strip():
            said = "is of a whole answer, and the last message has begun it: leave one out, or send"
            raise Refusal(
                f"{followed.field} {said} continue_final_message: false", param="messages"
            )


# What responses have in the place of fields of chats.
_OF_RESPONSES = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}


class TextForm(Fields):
    """What the text of a response must follow."""

    format: dict[str, Any] | None = None


class ResponseRequest(Asked, Reasons):
    """A request for the next message, in the newer of OpenAI's two ways."""

    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: Annotated[str | None, SOMETHING] = None
    max_output_tokens: Whole | None = None
    store: bool | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    text: TextForm | None = None
    metadata: dict[str, Any] | None = None
    include: list[str] | None = None
    prompt_cache_key: str | None = None
    top_logprobs: Whole | None = None
    continues: ClassVar[bool] = False

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities are asked for."""
        return "message.output_text.logprobs" in (self.include or ())

    @property
    def length_field(self) -> str:
        """As of a chat."""
        return "max_output_tokens"

    @property
    def followed(self) -> Format | None:
        """As of a chat."""
        return format_of(self, self.format, "text.format")

    @property
    def format(self) -> dict[str, Any] | None:
        """What the answer must follow, as it was sent."""
        return self.text.format if self.text else None

    def require_here(self) -> None:
        """Raises Refusal for what this server cannot do."""
        for name in ("background", "conversation", "prompt"):
            if getattr(self, name):
                raise Refusal(f"{name} is not supported: leave it out", param=name)
        for name, here in _OF_RESPONSES.items():
            if getattr(self, name) is not None:
                raise Refusal(f"{name} is not a field of responses: send {here}", param=name)

    def messages(self, shown: Shown) -> list[Plain]:
        """For the chat template; raises Refusal if there is none, or one has more than text."""
        if not self.input:
            raise Refusal("input is empty: say something", param="input")
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return item_messages(self.input, shown)


class Completion(Sampled):
    """A request for how a text goes on."""

    prompt: str | list[str] | list[int] | list[list[int]] | None = None
    echo: bool | None = None
    logprobs: Whole | bool | None = None
    suffix: str | None = None
    best_of: Whole | None = None

    def require_here(self) -> None:
        """Raises Refusal for what this server cannot do."""
        if self.suffix:
            raise Refusal("suffix is not supported: a text goes on at its end", param="suffix")
        if self.best_of not in (None, self.choices):
            raise Refusal("best_of is not supported: leave it out, or ask for n", param="best_of")

    def prompts(self) -> list[str | list[int]]:
        """Each as a text or as token ids. Raises Refusal if there is none."""
        prompt = self.prompt
        if not prompt:
            raise Refusal("prompt is empty: send some text, or token ids", param="prompt")
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [[each for each in prompt if isinstance(each, int)]]
        return [each for each in prompt if not isinstance(each, int)]


class Tokenizing(Named, Talk):
    """A text or a chat to tokenize, in the words of vLLM and of llama.cpp."""

    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None


class Detokenizing(Named):
    """Tokens to turn into text."""

    tokens: list[int]


def parsed(kind: type[_Model], plain: Mapping[str, Any]) -> _Model:
    """A request's fields. Raises Refusal if one is missing, misspelled, or of the wrong type.

    Clients send fields of other servers, and nobody has a list of all of them: so a field without a
    meaning here is ignored, unless its name is nearly that of one that the request does not have.
    """
    lacking = [name for name in kind.model_fields if name not in plain]
    for name in ignored(kind, plain):
        near = [_MEANT[name]] if name in _MEANT else get_close_matches(name, lacking, 1, _ALIKE)
        if near and near[0] in lacking and name not in _NOT_MEANT and plain[name] is not None:
            raise Refusal(f"{name} is not a field: did you mean {near[0]}?", param=name)
    try:
        return kind.model_validate(plain)
    except ValidationError as error:
        raise refusal_of_fields(error, plain) from None


def ignored(kind: type[BaseModel], plain: Mapping[str, Any]) -> list[str]:
    """Names of a request's fields that mean nothing here, the first of them."""
    others = (name for name in plain if name not in kind.model_fields and _NAME.fullmatch(name))
    return [*islice(others, _LOOKED_AT)]


def checked_field(name: str, value: Any, field: str, param: str = "") -> Any:
    """A setting that came in a field, or in a part of one, `param`. Raises Refusal if it cannot
    be."""
    try:
        value = checked(name, value, field)
        require_meaning(name, value, field)
    except SettingError as error:
        raise Refusal(str(error), param=param or field.partition(".")[0]) from None
    return value


def _followed(followed: Format) -> str:
    field, param = followed.field, followed.param
    if followed.is_json:
        return str(checked_field("schema", followed.schema, f"{field}: the schema", param))
    try:
        return str(checked_field("schema", followed.schema, field, param))
    except Refusal as error:
        said = re.split(": give a (JSON Schema|simpler)", str(error))[0]
        raise Refusal(f"{said}: correct it", param=param) from None


def _own(given: Mapping[str, Any], usual: Settings) -> dict[str, Any]:
    for name in given:
        if name not in OWN:
            raise Refusal(
                f"kvlite.{name[:40]} is no setting of a request: there is {', '.join(OWN)}",
                param="kvlite",
            )
    values = {
        name: checked_field(name, value, f"kvlite.{name}")
        for name, value in given.items()
        if value is not None
    }
    return {name: value for name, value in values.items() if value != getattr(usual, name)}
