"""Messages of requests, as chat templates take them."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kvlite.server.refusals import Refusal

# Kinds of parts of messages that are text, and those of what was thought before it.
_TEXTS = ("text", "input_text", "output_text", "refusal")
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
# In results of tools a picture is named, as an agent sends all of them with each message.
_IMAGES = ("image", "image_url", "input_image")
UNSEEN = "[an image, which this model cannot see]"
# And those that are documents, by their id.
_FILES = ("file", "input_file")

Plain = dict[str, Any]
"""A message for a chat template: role and text, calls and what they came to; and the ids of
documents that it is about, until they are put into its text."""


class Fields(BaseModel):
    """Fields of a request; others are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class FileName(Fields):
    """A document that was uploaded."""

    file_id: str | None = None


class TextPart(Fields):
    """A part of a message: text, or a document that was uploaded."""

    type: str
    text: str | None = None
    thinking: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    file: FileName | None = None
    file_id: str | None = None

    @property
    def document(self) -> str | None:
        """The id of an uploaded document, if it is one."""
        named = self.file.file_id if self.file else self.file_id
        return named if self.type in _FILES else None


class Called(Fields):
    """The function that a call named."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Fields):
    """A call that an earlier answer made."""

    id: str | None = None
    function: Called

    def plain(self) -> dict[str, Any]:
        """As OpenAI has it."""
        return {"id": self.id or "", "type": "function", "function": self.function.model_dump()}


Content = str | list[TextPart] | None


def text_of(content: Content, where: str, param: str) -> str:
    """The text of a message or a tool's result; raises Refusal if there is more than text."""
    if not isinstance(content, list):
        return content or ""
    for part in content:
        if part.type not in (*_TEXTS, *_THOUGHTS) and part.document is None:
            said = (
                f"{where} has a part of type {part.type[:40]!r}: this server reads text, and files "
                "by the file_id of an upload"
            )
            raise Refusal(said, param=param, code="unsupported_content")
    texts = (part.text or part.refusal for part in content if part.type not in _THOUGHTS)
    return "\n".join(filter(None, texts))


def result_text(content: Content, where: str, param: str) -> str:
    """As `text_of`, of a tool's result."""
    if isinstance(content, list):
        images = TextPart(type="text", text=UNSEEN)
        content = [images if each.type in _IMAGES else each for each in content]
    return text_of(content, where, param)


def thought_of(content: Content) -> str:
    """What a message's parts have of reasoning."""
    parts = content if isinstance(content, list) else []
    texts = (
        part.thinking or part.reasoning or part.text for part in parts if part.type in _THOUGHTS
    )
    return "\n".join(filter(None, texts))


Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class Message(Fields):
    """A message of a chat."""

    role: Role
    content: Content = None
    tool_calls: list[ToolCall | None] | None = None
    function_call: dict[str, Any] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def plain(self, number: int, within: str = "messages") -> Plain:
        """For the chat template; `within` is the field of the request that lists it. Raises Refusal
        if it has something other than text, or nothing."""
        where = f"{within}[{number}]"
        if self.role == "function":
            said = f"{where} is of a function: send it as role tool, with tool_call_id"
            raise Refusal(said, param=within)
        if self.function_call:
            raise Refusal(f"{where}.function_call is not taken: send tool_calls", param=within)
        if self.content is None and self.role not in ("assistant", "tool"):
            said = f'{where} has no content: send its text ("" for none)'
            raise Refusal(said, param=within)
        role = "system" if self.role == "developer" else self.role
        text = result_text if role == "tool" else text_of
        made: Plain = {"role": role, "content": text(self.content, where, within)}
        if isinstance(self.content, list):
            found = (each.document for each in self.content)
            made |= {"documents": named} if (named := [*filter(None, found)]) else {}
        if calls := [each.plain() for each in self.tool_calls or () if each is not None]:
            made["tool_calls"] = calls
        thought = self.reasoning_content or self.reasoning or thought_of(self.content)
        if role == "assistant" and thought:
            made["reasoning_content"] = thought
        if role == "tool":
            made |= {"tool_call_id": self.tool_call_id or "", "name": self.name or ""}
        return made


def plain_messages(messages: Sequence[Message]) -> list[Plain]:
    """For the chat template; raises Refusal if there is none, or one has more than text."""
    if not messages:
        raise Refusal("messages is empty: say something", param="messages")
    return joined([each.plain(number) for number, each in enumerate(messages)])


def joined(messages: list[Plain]) -> list[Plain]:
    """Messages with the calls of one answer in one message, as templates expect them; a result
    without the name of its tool gets that of its call."""
    made, names = list[Plain](), dict[str, str]()
    for each in messages:
        calls = each.get("tool_calls", [])
        names |= {call["id"]: call["function"]["name"] for call in calls}
        if each["role"] == "tool" and not each["name"]:
            each = {**each, "name": names.get(each["tool_call_id"], "")}
        before = made[-1] if made else {"role": ""}
        if (
            each["role"] == "assistant"
            and before.keys() == {"role", "content", "reasoning_content"}
            and not before["content"]
        ):
            made[-1] = {**before, **each}  # what was thought before it was said
        elif calls and before["role"] == "assistant" and not each["content"]:
            made[-1] = {**before, "tool_calls": [*before.get("tool_calls", []), *calls]}
        else:
            made.append(each)
    return made
