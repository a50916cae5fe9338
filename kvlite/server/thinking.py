"""Fields of requests that say whether, and how much, a model reasons before it answers."""

from collections.abc import Mapping
from typing import Any

from kvlite.config.settings import Settings
from kvlite.model.answers.thinking import thinking_variables
from kvlite.server.messages import Fields
from kvlite.server.refusals import Refusal

# Kinds of `thinking`, as DeepSeek and GLM have it.
_KINDS = {"enabled": "on", "disabled": "off", "adaptive": "auto", "auto": "auto"}
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class Reasons(Fields):
    """The fields, in the words of OpenAI, Qwen, vLLM, DeepSeek and llama.cpp."""

    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: dict[str, Any] | bool | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    reasoning_budget: int | None = None

    @property
    def effort(self) -> str | None:
        """How much it reasons, in a word; None if that is not said. Raises Refusal for others."""
        effort = self.reasoning_effort or (self.reasoning or {}).get("effort")
        if effort is not None and effort not in _EFFORTS:
            said = f"reasoning_effort {str(effort)[:40]!r} is none of {', '.join(_EFFORTS)}"
            raise Refusal(said, param="reasoning_effort")
        return effort

    @property
    def most_reasoning(self) -> int | None:
        """The most tokens of reasoning; None for no limit of this request."""
        thinking = self.thinking if isinstance(self.thinking, Mapping) else {}
        given = (
            self.thinking_budget,
            self.thinking_token_budget,
            self.reasoning_budget,
            thinking.get("budget_tokens"),
            (self.reasoning or {}).get("max_tokens"),
        )
        most = next((each for each in given if each is not None), None)
        if most is None or most == -1:
            return None
        if not isinstance(most, int) or most < 0:
            said = f"a budget of {str(most)[:40]} tokens of reasoning: send 0 or more"
            raise Refusal(said, param="thinking_budget")
        return most

    def variables(self, usual: Settings) -> dict[str, Any]:
        """What the chat template is told. Raises Refusal if a field says what is not known."""
        effort = self.effort
        thinking = usual.thinking
        if effort is not None:
            thinking = "off" if effort == "none" else "on"
        if isinstance(self.thinking, Mapping):
            kind = str(self.thinking.get("type"))
            if kind not in _KINDS:
                said = f"thinking.type {kind[:40]!r} is none of {', '.join(_KINDS)}"
                raise Refusal(said, param="thinking")
            thinking = _KINDS[kind]
        for each in (self.enable_thinking, self.thinking):
            if isinstance(each, bool):
                thinking = "on" if each else "off"
        if self.most_reasoning == 0:
            thinking = "off"
        made = thinking_variables(thinking)
        if effort is not None:
            made["reasoning_effort"] = effort
        return made | (self.chat_template_kwargs or {})
