"""What other servers are asked and answer, by OpenAI's API: settings as fields of a request, and an
answer from its parts."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvlite.config.checked_file import from_json
from kvlite.config.settings import Settings
from kvlite.errors import SettingError

if TYPE_CHECKING:
    from kvlite.web.openai_client import OpenAIClient

# Settings that servers know, by the names of OpenAI's API, vLLM and llama.cpp.
FIELDS = {
    **{
        name: name
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"),
            *("presence_penalty", "frequency_penalty", "stop"),
        )
    },
    "max_new_tokens": "max_tokens",
}
# Those that kvlite's own server takes besides, under `kvlite`.
TAKEN = (
    *("method", "budget", "kv_bits", "recall", "recall_bits", "recall_entries", "speculate"),
    "never_lossy",
)
# Of reasoning, by the names of kvlite, vLLM, SGLang and llama.cpp; others may refuse them.
REASONS = ("thinking", "reasoning_budget")
# All that a server can be told, or that is done before it is.
SAID = {*FIELDS, *TAKEN, *REASONS, "model", "system", "logit_bias", "schema", "ocr", "encoding"}


@dataclass
class ServerAnswer:
    """An answer, as far as it has come.

    Attributes:
        usage: its cost, if the server says so.
        thoughts: in how many parts its reasoning came.
    """

    text: str = ""
    reasoning: str = ""
    thoughts: int = 0
    finish_reason: str | None = None
    model: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, chunk: Any) -> bool:
        """Take a chunk of the stream; whether it has text or reasoning. Malformed ones raise what
        Python raises."""
        self.usage |= chunk.get("usage") or {}
        choice = (chunk.get("choices") or [{}])[0]
        delta = choice.get("delta") or {}
        text = delta.get("content") or ""
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        thought = thought if isinstance(thought, str) else ""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.text += text
        self.reasoning += thought
        self.thoughts += bool(thought)
        return bool(text or thought)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of its reasoning; until the server says so, the parts in which it came."""
        details = self.usage.get("completion_tokens_details")
        return _count(details, "reasoning_tokens") or self.thoughts

    def line(self) -> str:
        """What it cost, in words."""
        read, made = (_count(self.usage, each) for each in ("prompt_tokens", "completion_tokens"))
        if not made:
            return self.model
        known = _count(self.usage.get("prompt_tokens_details"), "cached_tokens")
        said = f", {known:,} of them known" if known else ""
        return f"{self.model}: {read:,} tokens sent{said}, {made:,} generated"


@dataclass(frozen=True)
class Upstream:
    """A server that answers in the place of a model here.

    Attributes:
        models: what its models are called.
        given: names of the settings that were given, which go along even where they are the usual
            ones.
    """

    client: "OpenAIClient"
    models: Sequence[str]
    given: frozenset[str]


def fields_of(settings: Settings, names: Collection[str]) -> dict[str, Any]:
    """Settings as fields of a request; raises SettingError if one cannot be said to a server."""
    said = {to: getattr(settings, name) for name, to in FIELDS.items() if name in names}
    made = {to: value for to, value in said.items() if value is not None}
    if "model" in names:
        made["model"] = settings.model
    if settings.thinking != "auto":
        switch = ("enable_thinking", "thinking")
        made["chat_template_kwargs"] = dict.fromkeys(switch, settings.thinking == "on")
    if settings.reasoning_budget is not None:
        made["thinking_token_budget"] = settings.reasoning_budget
    if settings.logit_bias:
        pairs = (each.partition(":") for each in settings.logit_bias)
        made["logit_bias"] = {token: float(bias) for token, _, bias in pairs}
    if settings.schema:
        made["response_format"] = _format(settings.schema.strip())
    if own := {name: getattr(settings, name) for name in TAKEN if name in names}:
        made["kvlite"] = own
    return made


def _format(schema: str) -> dict[str, Any]:
    if schema == "json":
        return {"type": "json_object"}
    if not schema.startswith("{"):
        raise SettingError("--schema with --server is a JSON Schema, or json: not a grammar")
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": from_json(schema)},
    }


def _count(usage: Any, name: str) -> int:
    found = usage.get(name) if isinstance(usage, dict) else None
    return found if isinstance(found, int) else 0
