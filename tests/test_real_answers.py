"""Chat templates as models publish them: the form of answers that is read off each, and that what
they render is allowed by the grammar and read back."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from kvlite.model.answers.derive import ENDS, Probe, answer_form, cleaned
from kvlite.model.answers.form import ID, AnswerForm, Tool
from kvlite.model.answers.grammar import answer_grammar
from kvlite.model.answers.reader import AnswerReader
from kvlite.model.answers.thinking import opens_reasoning, thinking_variables
from kvlite.model.chat_template import chat_tokens
from kvlite.model.control_tokens import Controls
from kvlite.model.end_of_turn import end_of_turn
from kvlite.model.grammar import Vocabulary
from tests.test_real_templates import NAMES, small, with_template
from tests.written_calls import written

TOOLS = [
    Tool(
        "get_weather",
        "Weather of a place",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where"},
                "days": {"type": "integer", "description": "How many"},
                "tags": {"type": "array", "items": {"type": "string"}, "description": "-"},
            },
            "required": ["city"],
        },
    ),
    Tool("clock", "Time", {"type": "object", "properties": {}}),
    Tool(
        "write",
        "Write a file",
        {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "-"},
                "text": {"type": "string", "description": "-"},
            },
            "required": ["path", "text"],
        },
    ),
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'Yo"rk\n(x)', "days": 3, "tags": ["a", "b"]}),
    ("clock", {}),
    ("write", {"path": "a.py", "text": "def f():\n    return '<b>' + \"x\"\n"}),
]
# Templates of models that make no calls, or none that can be read.
NO_CALLS = {
    "GigaChat3-10B-A1.8B",  # its end token stands before a call
    "HuggingFaceTB-SmolLM3-3B",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "google-gemma-2-2b-it",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
ONE_CALL = {f"meta-llama-Llama-3.{n}" for n in ("1-8B", "2-3B", "3-70B")} | {"openai-gpt-oss-120b"}
# Where the template writes calls in other words than the model, or not at all.
NOT_RENDERED = {"ByteDance-Seed-OSS", "LFM2-8B-A1B", "openai-gpt-oss-120b"}
REASONING = {
    "<think>": (
        "GLM-4.6 GLM-4.7-Flash GLM-5.2 HuggingFaceTB-SmolLM3-3B Qwen-QwQ-32B Qwen-Qwen3-0.6B "
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 Qwen3.5-4B StepFun3.5-Flash llama-cpp-rwkv-world "
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B deepseek-ai-DeepSeek-R1-Distill-Qwen-32B "
        "deepseek-ai-DeepSeek-V3.2 deepseek-ai-DeepSeek-V4 llama-cpp-deepseek-r1 "
        "stepfun-ai-Step-3.5-Flash"
    ),
    "<seed:think>": "ByteDance-Seed-OSS",
    "<|START_THINKING|>": "Cohere2MoE CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "[THINK]": "mistralai-Ministral-3-14B-Reasoning-2512",
    "<|channel>thought": "google-gemma-4-31B-it",
    "<|channel|>analysis<|message|>": "openai-gpt-oss-120b",
}
BEGINS = {name: begin for begin, names in REASONING.items() for name in names.split()}
# Whether the prompt begins reasoning, with thinking left to the template, on, and off.
OPENS = {
    "Cohere2MoE": (True, True, False),
    "GLM-4.7-Flash": (True, True, False),
    "GLM-5.2": (True, True, False),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (True, True, False),
    "Qwen3.5-4B": (True, True, False),
    "deepseek-ai-DeepSeek-V3.2": (False, True, False),
    "deepseek-ai-DeepSeek-V4": (False, True, False),
    "StepFun3.5-Flash": (True, True, True),
    "stepfun-ai-Step-3.5-Flash": (True, True, True),
    "Qwen-QwQ-32B": (False, True, False),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": (True, True, True),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": (False, True, False),
    "llama-cpp-deepseek-r1": (True, True, True),
    "llama-cpp-rwkv-world": (False, True, False),
}


@pytest.fixture(params=["small", pytest.param("embedded", marks=pytest.mark.long)])
def vocabulary(request: pytest.FixtureRequest) -> Any:
    if request.param == "embedded":
        return request.getfixturevalue("smollm").tokenizer
    return small("smollm2")


def ending(tokenizer: Any) -> tuple[list[str], frozenset[int]]:
    end = end_of_turn(tokenizer)
    return ([], frozenset()) if end is None else ([tokenizer.decode([end])], frozenset({end}))


def read(form: AnswerForm, text: str, size: int) -> tuple[str, list[tuple[str, Any]]]:
    reader, said, calls = AnswerReader(form, TOOLS), "", list[list[str]]()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for part in [part for piece in pieces for part in reader.push(piece)] + reader.flush():
        if part.kind == "name":
            calls.append([part.text, ""])
        elif part.kind == "arguments":
            calls[-1][1] += part.text
        elif part.kind == "text":
            said += part.text
    return said, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", NAMES)
def test_calls_that_a_template_renders_are_allowed_and_read_back(
    vocabulary: Any, name: str
) -> None:
    tokenizer, _ = with_template(vocabulary, name)
    ends, numbers = ending(tokenizer)
    form = answer_form(tokenizer, ends)
    assert (form.calls is None) is (name in NO_CALLS)
    if form.calls is None:
        return
    assert form.calls.several is not any(name.startswith(each) for each in ONE_CALL)
    calls = CALLS if form.calls.several else CALLS[:1]
    answer = written(form.calls, calls).replace(ID, "abcdefgh1").strip()
    if name not in NOT_RENDERED:
        shown = Probe(tokenizer, Controls(tokenizer).spelled).body(calls)
        answer = cleaned(shown or "", {*ends, *ENDS}, form.reasoning).strip()
    vocabulary = Vocabulary(tokenizer, len(tokenizer), numbers)
    before = "Let me see. " if form.calls.trigger else ""
    for given in ({"needed": True}, {}):
        rules = answer_grammar(form, tokenizer, vocabulary.trie, TOOLS, ends=numbers, **given)
        if not rules:
            continue
        matcher = LLMatcher(vocabulary.trie, LLMatcher.grammar_from_lark(rules), log_level=0)
        text = answer if given else before + answer
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert matcher.try_consume_tokens(ids) == len(ids), text
        assert matcher.is_accepting()
    for size in (1, 3, 4096):
        assert read(form, before + answer, size) == (before.strip(), calls)


@pytest.mark.parametrize("vocabulary", ["small"], indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_reasoning_is_told_by_the_template(vocabulary: Any, name: str) -> None:
    tokenizer, _ = with_template(vocabulary, name)
    form = answer_form(tokenizer, ending(tokenizer)[0])
    begin = None if form.reasoning is None else form.reasoning.begin
    assert begin == BEGINS.get(name)
    if form.reasoning is None:
        return
    messages = [{"role": "user", "content": "Why?"}]
    opens = tuple(
        opens_reasoning(
            form, tokenizer, chat_tokens(tokenizer, messages, (), thinking_variables(each))
        )
        for each in ("auto", "on", "off")
    )
    assert opens == OPENS.get(name, (False, False, False))
    reader = AnswerReader(form, reasoning=opens[0])
    answer = f"{'' if opens[0] else begin}\nHm.\n{form.reasoning.end}\n\nIt is."
    parts = [part for piece in answer for part in reader.push(piece)] + reader.flush()
    for kind, wanted in (("reasoning", "Hm."), ("text", "It is.")):
        assert "".join(part.text for part in parts if part.kind == kind) == wanted
