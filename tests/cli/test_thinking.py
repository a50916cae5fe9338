"""Reasoning at the command line: counted while it comes, folded into a line, kept apart."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlite.cli.chat.command import _entered
from kvlite.cli.console import Screen
from kvlite.cli.thinking import ThinkingLine
from kvlite.config.settings import Settings
from kvlite.engine.callbacks import NO_CALLBACKS
from kvlite.jobs.answer import BatchAnswer
from kvlite.server.config import ServerConfig
from kvlite.web.openai_client import OpenAIClient
from kvlite.web.server_api import Upstream
from kvlite.web.server_talk import Said, ServerTalk
from tests.cli.conftest import Run
from tests.cli.test_chat import playing
from tests.foreign import Foreign
from tests.server.conftest import Server, serving
from tests.thoughts import LARK, SAID, STUBBORN, THOUGHT, thinking_model

FOLDED = r"Thought for \d\d tokens"


@pytest.fixture(scope="module")
def thinker(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinking_model(tmp_path_factory.mktemp("thinker"), tiny_folder)


def drawn(*heard: tuple[str, str, int], terminal: bool = True, **how: Any) -> str:
    """What a line of thinking writes, of what is heard."""
    file = io.StringIO()
    screen = Screen(file=file, force_terminal=terminal, width=60, **how)
    with ThinkingLine(screen, folds=True) as line:
        for each in heard:
            line.hear(*each)
    return file.getvalue()


def test_a_terminal_counts_in_place_then_one_line_stays() -> None:
    heard = [("Hm", "", 1), (" hm", "", 2), ("", "", 3), ("", "So", 3), ("", " so", 3)]
    shown = drawn(*heard)
    assert "Thinking, 2 tokens" in shown and "\x1b[2K" in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", shown)
    assert plain.endswith("Thought for 3 tokens\n") and plain.count("Thought") == 1
    assert drawn(*heard, terminal=False) == "Thought for 3 tokens\n"
    assert drawn(*heard[:2], terminal=False) == "Thought for 2 tokens\n", "it was cut"
    assert drawn(*heard, quiet=True) == "" == drawn(("", "So", 9), terminal=False)


def test_answers_are_apart_from_what_was_thought(
    kvlite: Run, thinker: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--model", thinker, "--schema", LARK)
    done = kvlite("ask", text, "Two and two?", *flags)
    assert (done.code, done.out) == (0, f"{SAID}\n")
    assert re.match(f"{FOLDED}\nread ", done.err)
    answer = kvlite("ask", text, "Two and two?", *flags, "--json").json()
    assert (answer["answer"], answer["reasoning"]) == (SAID, THOUGHT)
    assert 15 < answer["reasoning_tokens"] < answer["generated_tokens"]
    several = kvlite("ask", text, "Two?", "And two?", *flags)
    assert several.out == f"1. Two?\n{SAID}\n2. And two?\n{SAID}\n"
    assert len(re.findall(f"^{FOLDED}$", several.err, re.MULTILINE)) == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("Two?\n"))
    piped = kvlite("chat", *flags)
    assert (piped.code, piped.out, piped.err) == (0, f"{SAID}\n", "")
    off = kvlite("ask", text, "Two?", *flags[:2], "--thinking", "off", "--max-tokens", 3, "--json")
    assert off.json()["reasoning_tokens"] == 0 and "reasoning" not in off.json()


def test_a_switch_that_is_not_there_is_named(
    kvlite: Run, thinker: Path, tiny_folder: Path, text: Path, tmp_path: Path
) -> None:
    model = thinking_model(tmp_path, tiny_folder, STUBBORN)
    flags = ("--max-tokens", 3, "--thinking", "off", "--model")
    done = kvlite("ask", text, "Two?", "And two?", *flags, model)
    assert done.err.count("Note: --thinking off changes nothing: this model's chat") == 1
    assert "changes nothing" not in kvlite("ask", text, "Two?", *flags, thinker).err
    flags = ("--max-tokens", 3, "--reasoning-budget", 5, "--model")
    done = kvlite("ask", text, "Two?", "And two?", *flags, tiny_folder)
    assert done.err.count("Note: --reasoning-budget 5 changes nothing: this model's chat") == 1
    assert "changes nothing" not in kvlite("ask", text, "Two?", *flags, thinker).err


@pytest.mark.long
def test_a_chat_folds_it_and_shows_it_when_asked(thinker: Path, tmp_path: Path) -> None:
    with playing(thinker, tmp_path, "--schema", LARK) as player:
        player.sees_prompt()
        player.type("/thinking")
        player.sees("nothing has been said yet")
        player.type("Two and two?")
        player.sees("Thinking, ", "Thought for ", "It is ", "four", "from all")
        player.type("/thinking")
        player.sees("Two and <img src=x> two.", "So `4`?")
        player.type("/thinking off")
        player.sees("thinking is off now.")
        player.type("/set schema none")
        player.type("/set max-tokens 3")
        player.sees_prompt()
        player.type("Two?")
        player.sees("from all")
        player.type("/thinking")
        player.sees("There was no reasoning before the last answer.")
        player.type("/exit")
        assert player.ends() == 0
    assert player.shown.count("Thought for") == 1


def test_rows_of_a_batch_have_it(kvlite: Run, thinker: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    tasks = tmp_path / "tasks.jsonl"
    rows = [{"id": str(at), "document": str(text), "question": "Two?"} for at in range(2)]
    tasks.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    assert kvlite("batch", tasks, "--out", out, "--model", thinker, "--schema", LARK).code == 0
    for line in out.read_text().splitlines():
        row = json.loads(line)
        assert (row["answer"], row["reasoning"]) == (SAID, THOUGHT)
        assert row["metrics"]["reasoning_tokens"] > 15
    assert "reasoning" not in BatchAnswer("1", "", "").to_json()
    body = {"messages": [{"role": "user", "content": "Two?"}]}
    request = {"custom_id": "a", "url": "/v1/chat/completions", "body": body}
    tasks.write_text(json.dumps(request))
    out.unlink()
    assert kvlite("batch", tasks, "--out", out, "--model", thinker, "--schema", LARK).code == 0
    body = json.loads(out.read_text())["response"]["body"]
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (SAID, THOUGHT)
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 15


@pytest.fixture(scope="module")
def served(thinker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = ServerConfig(folder=tmp_path_factory.mktemp("server"), keys=["secret"])
    with serving(Settings(model=str(thinker), schema=LARK), config) as found:
        yield found


def test_a_server_of_kvlites_says_it_apart(
    served: Server, kvlite: Run, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLITE_API_KEY", "secret")
    done = kvlite("ask", text, "Two?", "--server", served.address)
    assert (done.code, done.out) == (0, f"{SAID}\n")
    assert re.match(r"Thought for \d+ tokens\n", done.err)
    answer = kvlite("ask", text, "Two?", "--server", served.address, "--json").json()
    assert (answer["answer"], answer["reasoning"]) == (SAID, THOUGHT)


def test_other_servers_are_told_and_heard_in_their_words(
    foreign: Foreign, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [
        {"reasoning": "Hm"},
        {"reasoning": ", hm."},
        {"content": "So", "reasoning_content": None},
        {"reasoning": {"no": "text"}},
    ]
    monkeypatch.setattr(foreign, "deltas", chunks)
    settings = Settings(model="odd/one", thinking="off", reasoning_budget=50)
    talk = ServerTalk(
        Upstream(OpenAIClient(foreign.url), ["odd/one"], frozenset({"model"})), settings, Said()
    )
    answers = [(each.reasoning, each.text) for each in talk.say("One")(NO_CALLBACKS)]
    assert answers[-1] == ("Hm, hm.", "So") and talk.said.turns[-1].reasoning_tokens == 2
    list(talk.say("Two")(NO_CALLBACKS))
    first, second = foreign.asked
    assert first["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    assert first["thinking_token_budget"] == 50
    assert second["messages"][1] == {
        "role": "assistant",
        "content": "So",
        "reasoning_content": "Hm, hm.",
    }
    talk.change(thinking="auto", reasoning_budget=None)
    list(talk.say("Three")(NO_CALLBACKS))
    assert not {"chat_template_kwargs", "thinking_token_budget"} & foreign.asked[-1].keys()
    file = io.StringIO()
    assert _entered(talk, Screen(file=file), "/thinking") is None
    assert file.getvalue() == "Hm, hm.\n"
