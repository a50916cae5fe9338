"""Requests as Codex sends them: groups of tools, tools that take any text, and what is left out."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlite.config.settings import Settings
from kvlite.model.answers.reader import Part
from kvlite.server.config import ServerConfig
from kvlite.server.custom_input import CustomInput
from kvlite.server.response_items import items_of
from kvlite.server.response_tools import _INPUT, ResponseTools
from tests.server.conftest import Server, said, serving, with_template
from tests.server.test_refusing import require_error
from tests.server.test_responses import events_of
from tests.server.test_tools import CLOCK, PARAMETERS, TEMPLATE, WEATHER, require_call

REAL = Path(os.environ.get("KVLITE_REAL", Path(__file__).parents[3] / "shared/real"))
RECORDED = [REAL / "requests" / f"{name}.json" for name in ("codex", "codex-plain")]
PATCH = '*** Begin Patch\n+ "\\d" é 🦩\n*** End Patch'
GROUP: Any = {
    "type": "namespace",
    "name": "sky",
    "description": "What is above.",
    "tools": [{"type": "function", **WEATHER}, {"type": "function", **CLOCK}],
}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
CUSTOM: Any = {"type": "custom", "name": "patch", "description": "Edits.", "format": GRAMMAR}


@pytest.fixture(scope="module")
def codex(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the tiny model with a long context and a template that has tools."""
    folder = tmp_path_factory.mktemp("codex")
    model = with_template(tiny_folder, folder, TEMPLATE)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 15}))
    settings = Settings(model=str(model), max_new_tokens=90)
    with serving(settings, ServerConfig(folder=folder)) as found:
        yield found


@pytest.fixture
def patching(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model, which must write an input that it would never end, writes the patch."""
    parameters = _INPUT | {"properties": {"input": {"const": PATCH}}}
    monkeypatch.setattr("kvlite.server.response_tools._INPUT", parameters)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_what_codex_sends_is_answered(
    codex: Server, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not path.exists():
        pytest.skip(f"there is no {path}: set KVLITE_REAL")
    body = json.loads(path.read_text())["body"]
    body |= {"model": codex.model.names[0], "max_output_tokens": 8}
    with caplog.at_level("INFO", "kvlite.server"):
        events = events_of(codex.http.post("/v1/responses", json=body, timeout=300))
    hosted = any(each["type"] == "web_search" for each in body["tools"])
    assert hosted == any("does not run: web_search" in each for each in caplog.messages)
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert [kind for kind in kinds if kind != "output_text.delta"] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    (done,) = (each["item"] for each in events if each["type"] == "response.output_item.done")
    streamed = events[-1]["response"]
    assert streamed["output"] == [done] and done["status"] == "incomplete"
    assert {"input_tokens", "output_tokens", "total_tokens"} <= streamed["usage"].keys()
    whole = codex.http.post("/v1/responses", json=body | {"stream": False}, timeout=300).json()
    for made in (streamed, whole):
        for field in ("prompt_cache_key", "reasoning", "store", "tool_choice"):
            assert made[field] == body[field]
        assert [each["type"] for each in made["tools"]] == [each["type"] for each in body["tools"]]
    assert whole["output"][0]["content"] == done["content"]


def test_a_call_of_a_tool_in_a_group_has_its_group(codex: Server) -> None:
    create: Any = codex.client.responses.create
    name = codex.model.names[0]
    given: dict[str, Any] = {"model": name, "tools": [{"type": "function", **CLOCK}, GROUP]}
    forced = {"tool_choice": {"type": "function", "name": "weather"}}
    made = create(input="Weather?", **given, **forced)
    (call,) = made.output
    assert call.type == "function_call" and (call.namespace, call.name) == ("sky", "weather")
    require_call(call.name, call.arguments)
    events: list[Any] = list(create(input="Weather?", stream=True, **given, **forced))
    (done,) = (each.item for each in events if each.type == "response.output_item.done")
    assert (done.namespace, done.name, done.arguments) == ("sky", "weather", call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id,
                   "output": [{"type": "input_text", "text": "rain"}]}  # fmt: skip
    given["max_output_tokens"] = 4
    follow = create(input=[result], previous_response_id=made.id, **given)
    items: Any = [*said("Weather?"), call.model_dump(), result]
    whole = create(input=items, **given)
    assert whole.usage and follow.usage and whole.usage.input_tokens == follow.usage.input_tokens
    assert whole.output_text == follow.output_text and whole.output_text
    assert whole.usage.input_tokens_details.cached_tokens > 90
    plain = create(
        input="Weather?",
        model=name,
        tools=[{**GROUP, "name": "functions"}],
        tool_choice={"type": "function", "name": "weather"},
    ).output[0]
    assert plain.type == "function_call" and plain.namespace is None and plain.name == "weather"


@pytest.mark.usefixtures("patching")
def test_a_tool_that_takes_any_text_is_called_and_goes_on(codex: Server) -> None:
    create: Any = codex.client.responses.create
    name = codex.model.names[0]
    given: dict[str, Any] = {"model": name, "tools": [CUSTOM], "max_output_tokens": 200}
    forced = {"tool_choice": {"type": "custom", "name": "patch"}}
    made = create(input="Edit.", **given, **forced)
    (call,) = made.output
    assert call.type == "custom_tool_call" and (call.name, call.input) == ("patch", PATCH)
    assert made.status == "completed" and made.tools[0].type == "custom"
    events: list[Any] = list(create(input="Edit.", stream=True, **given, **forced))
    kinds = [each.type.removeprefix("response.") for each in events]
    deltas = [each.delta for each in events if each.type.endswith("input.delta")]
    assert len(deltas) > 3 and "".join(deltas) == PATCH
    assert [each for each in kinds if each != "custom_tool_call_input.delta"] == [
        *("created", "in_progress", "output_item.added"),
        *("custom_tool_call_input.done", "output_item.done", "completed"),
    ]
    assert events[-3].input == PATCH and events[-1].response.output[0].input == PATCH
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    given["max_output_tokens"] = 4
    follow = create(input=[result], previous_response_id=made.id, **given)
    whole = create(input=[*said("Edit."), call.model_dump(), result], **given)
    assert whole.usage and follow.usage and whole.usage.input_tokens == follow.usage.input_tokens
    assert whole.output_text == follow.output_text
    assert whole.usage.input_tokens_details.cached_tokens > 60


def test_items_that_say_nothing_here_are_left_out(
    codex: Server, caplog: pytest.LogCaptureFixture
) -> None:
    def tokens(items: Any) -> int:
        made = codex.http.post("/v1/responses", json={"input": items, "max_output_tokens": 1})
        assert made.status_code == 200, made.text
        return int(made.json()["usage"]["input_tokens"])

    strange: Any = [
        {"type": "web_search_call", "id": "ws", "action": {"type": "search"}, "status": 1},
        {"type": "local_shell_call", "action": {}, "call_id": None},
        {"type": "shell_call_output", "output": [{"stdout": "a"}]},
        {"type": "compaction", "encrypted_content": "a"},
        {"type": "item_reference", "id": "a"},
        {"type": "new\nkind", "content": 5, "role": "robot"},
    ]
    with caplog.at_level("INFO", "kvlite.server"):
        assert tokens([*strange, *said("Hi"), *strange]) == tokens(said("Hi"))
    (told,) = (each for each in caplog.messages if "left out (12)" in each)
    assert all(repr(each["type"]) in told for each in strange)
    secret = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA=="}
    assert tokens([*said("Hi"), secret, *said("", "a")[1:], *said("b")])


def names(tools: Any, choice: Any = None) -> tuple[list[str], ResponseTools]:
    made = ResponseTools(tools, choice)
    return [each["function"]["name"] for each in made.functions], made


def test_tools_have_names_that_templates_take_and_no_two_one() -> None:
    tools: Any = [
        {"type": "namespace", "name": "a b.c", "tools": [CUSTOM, {**CUSTOM, "type": "function"}]},
        {"type": "function", "name": "a_b_c__patch"},
        CUSTOM,
        {"type": "function", "name": "patch"},
        {"type": "namespace", "name": "n" * 200, "tools": [{"type": "function", **WEATHER}]},
        {"type": "image_generation"},
    ]
    found, made = names(tools)
    assert found == [
        *("a_b_c__patch_2", "a_b_c__patch_3", "a_b_c__patch", "patch_2", "patch"),
        f"{'n' * 119}__weather",
    ]
    calls = [made.named(each) for each in found]
    assert [made.shown(each) for each in calls] == found
    assert [(each.kind, each.namespace) for each in calls[:4]] == [
        *(("custom_tool_call", "a b.c"), ("function_call", "a b.c")),
        *(("function_call", ""), ("custom_tool_call", "")),
    ]
    unknown = made.named("a__b")
    assert (unknown.kind, unknown.name, unknown.namespace) == ("function_call", "a__b", "")
    one = {"type": "custom", "name": "patch"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [one]}
    chosen = names([CUSTOM, {"type": "function", "name": "patch"}], allowed)[1].choice
    assert chosen["tools"] == [{"type": "function", "name": "patch_2"}]
    (told, clock) = ResponseTools([GROUP], None).functions
    assert told["function"]["description"] == "sky: What is above.\n\nWhat comes."
    assert told["function"]["parameters"] == PARAMETERS and not clock["function"]["description"]
    (patch,) = ResponseTools([CUSTOM], None).functions
    assert patch["function"]["description"].endswith("grammar (lark):\nstart: /.+/")


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ([{"type": "robot"}], None, "tools[0] is of type 'robot'"),
        ([{**GROUP, "tools": [GROUP]}], None, "tools[0].tools[0] is of type 'namespace'"),
        ([{**GROUP, "tools": 5}], None, "tools[0].tools is not a list"),
        ([{"type": "namespace", "tools": []}], None, "tools[0].name is missing"),
        ([GROUP, {"type": "custom"}], None, "tools[1].name is missing"),
        ([{**GROUP, "tools": [{"name": "a b"}]}], None, "tools[0].tools[0].name 'a b'"),
        (["patch"], "none", "tools[0] is of type 'patch'"),
        ([{"type": "web_search"}], {"type": "web_search"}, "'web_search'}\" is not supported"),
        (
            [GROUP, {"type": "mcp"}],
            {"type": "mcp", "server_label": "a"},
            "is not supported: send auto",
        ),
        ([{"type": "web_search"}], "required", "tool_choice wants a tool"),
        ([{**GROUP, "tools": [CUSTOM] * 300}], None, "there are 300 tools: 256 at most"),
        ([GROUP], {"type": "custom", "name": "weather"}, "'weather' is no tool here"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(
    codex: Server, tools: Any, choice: Any, words: str
) -> None:
    body = {"input": "Hi", "tools": tools, "tool_choice": choice}
    require_error(codex.http.post("/v1/responses", json=body), 400, words)


@pytest.mark.parametrize("spelled", [True, False])
@pytest.mark.parametrize("text", ["", PATCH, "\ud83d", "a\ud83d🦩\\u0041"])
def test_an_input_is_read_as_it_comes(text: str, spelled: bool) -> None:
    for given in ({"input": text}, {"input": text, "input2": "b"}, {"a": 1, "input": text}):
        arguments = json.dumps(given, ensure_ascii=spelled)
        for size in (1, 3, len(arguments)):
            reader = CustomInput()
            parts = [arguments[at : at + size] for at in range(0, len(arguments), size)]
            read = "".join([*map(reader.push, parts), reader.flush()])
            assert read == text.replace("\ud83d", "\ufffd")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('{"inp', ""),
        ('{"input": "ab\\u00', "ab"),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": "\\d \\uZZ"}', "\\d \\uZZ"),
        ('"x"', "x"),
    ],
)
def test_arguments_that_are_none_are_the_input(arguments: str, wanted: str) -> None:
    parts = [Part("text", "Now."), Part("name", "patch"), Part("arguments", arguments)]
    text, call = items_of(parts, ResponseTools([CUSTOM], None).named, is_cut=True)
    assert text["status"] == "completed" and call["status"] == "incomplete"
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", wanted)
