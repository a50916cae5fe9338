"""Forms that cannot be read off a template: it writes no calls, or others than the model."""

from collections.abc import Collection
from dataclasses import dataclass

from kvlite.model.answers.form import AnswerForm, CallForm, ReasoningForm
from kvlite.model.answers.gemma_arguments import GemmaArguments
from kvlite.model.answers.json_arguments import JSONArguments
from kvlite.model.answers.python_arguments import PythonArguments

_GEMMA = CallForm(
    "<|tool_call>call:", "", "<tool_call|><|tool_call>call:", "<tool_call|>", GemmaArguments()
)
# gpt-oss's history has calls in other words than it writes itself.
_HARMONY = CallForm(
    "<|channel|>commentary to=functions.",
    " <|constrain|>json<|message|>",
    "",
    "",
    JSONArguments(),
    several=False,
)
_MCP = CallForm(
    "<use_mcp_tool>\n<server_name>kvlite</server_name>\n<tool_name>",
    "</tool_name>\n<arguments>\n",
    "",
    "\n</arguments>\n</use_mcp_tool>",
    JSONArguments(),
    several=False,
)
_LFM = CallForm("<|tool_call_start|>[", "(", "), ", ")]<|tool_call_end|>", PythonArguments())
_GRANITE = CallForm(
    '<|tool_call|>[{"name": "', '", "arguments": ', '}, {"name": "', "}]", JSONArguments()
)


@dataclass(frozen=True)
class Known:
    """A form, and the words that are all in a template, or among its control tokens.

    Attributes:
        rendered: whether the template writes calls in this form, too.
    """

    words: tuple[str, ...]
    form: AnswerForm
    rendered: bool = False


_KNOWN = (
    Known(
        ("<|tool_call>", "call:", '<|"|>'),
        AnswerForm(_GEMMA, ReasoningForm("<|channel>thought", "<channel|>")),
        rendered=True,
    ),
    Known(
        ("<|channel|>", "<|message|>", "functions."),
        AnswerForm(
            _HARMONY,
            ReasoningForm("<|channel|>analysis<|message|>", "<|end|>"),
            (
                "<|start|>assistant",
                "<|channel|>final<|message|>",
                "<|channel|>commentary<|message|>",
                "<|end|>",
            ),
        ),
    ),
    Known(("<|tool_list_start|>",), AnswerForm(_LFM)),
    Known(("available_tools", "<|tool_call|>"), AnswerForm(_GRANITE)),
    Known(("<use_mcp_tool>", "<server_name>"), AnswerForm(_MCP)),
)


def known(source: str, controls: Collection[str]) -> Known | None:
    """What goes with a template; None if it is none of these."""
    found = (
        each for each in _KNOWN if all(word in source or word in controls for word in each.words)
    )
    return next(found, None)
