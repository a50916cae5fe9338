"""An agent's history, sent whole each turn: what was read is not read again."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlite.config.settings import Settings
from kvlite.server.config import ServerConfig
from tests.agents.history import Agent, Figures, ask, listing
from tests.agents.stand_in import standing_in
from tests.cli.conftest import model_of
from tests.server.conftest import Server, serving
from tests.server.test_tools import TEMPLATE

# Tokens around a message and of its answer, which come new with the next.
AROUND = 60


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a tiny model with room for a long history; a rule says what it answers."""
    folder = tmp_path_factory.mktemp("agents")
    model = model_of(folder, 32_768)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    settings = Settings(model=str(model), reserve_tokens=256)
    config = ServerConfig(folder=folder / "data")
    with standing_in(str(model)), serving(settings, config) as server:
        yield server


def agent(server: Server, system: str = "You are an agent. ") -> Agent:
    return Agent(server.address, server.model.names[0], system * 20)


@pytest.mark.long
def test_ten_turns_with_what_agents_do_between(agents: Server) -> None:
    main = agent(agents)
    main.result(0, 20)
    first = main.say("What is in it?")
    assert first.read == first.tokens > 2000
    for turn in range(1, 10):
        before = main.say("And what does that mean?").tokens
        main.result(turn, 20)
        asked = main.say(f"And in file {turn}?")
        assert asked.read <= asked.tokens - before
        title = [{"role": "user", "content": f"Give a title: {main.messages[-2]['content']}"}]
        ask(agents.address, main.model, title)
    assert asked.tokens > 9000
    # A result in the middle changes, then the history is as it was.
    at = next(n for n, each in enumerate(main.messages) if each.get("tool_call_id") == "call_5")
    edited = main.branch(len(main.messages))
    edited.messages[at]["content"] = listing(99, 20)
    changed = edited.say("And now?")
    back = main.say("And before?")
    assert back.read <= AROUND
    same = ask(agents.address, main.model, main.branch(at).messages, main.tools, 1).tokens
    assert 0 < changed.tokens - same - changed.read + AROUND < 2 * AROUND
    # A subagent has the system's words and the tools.
    other = main.branch(1).say("Look for the word scale. " * 10)
    assert other.read <= 10 * 8 + AROUND < first.read / 4
    assert main.say("Go on.").read <= AROUND


def test_two_agents_at_once_each_read_what_is_new(agents: Server) -> None:
    both = [agent(agents, f"You are agent {number}. ") for number in range(2)]
    figures: dict[tuple[int, int], Figures] = {}

    def work(number: int) -> None:
        for turn in range(4):
            both[number].result(turn, 10)
            figures[number, turn] = both[number].say(f"And in file {turn}?")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(300)
    assert len(figures) == 8
    for (number, turn), asked in figures.items():
        if turn:
            assert asked.read <= asked.tokens - figures[number, turn - 1].tokens


def test_what_was_read_is_known_after_a_restart(tmp_path: Path) -> None:
    model = model_of(tmp_path, 8192)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    settings = Settings(model=str(model), reserve_tokens=64)
    config = ServerConfig(folder=tmp_path / "data")
    with standing_in(str(model)):
        with serving(settings, config) as server:
            main = agent(server)
            main.result(0, 20)
            main.say("What is in it?")
        with serving(settings, config) as server:
            main.address = server.address
            main.result(1, 2)
            assert main.say("And in this?").read <= 2 * 50 + 2 * AROUND
            assert main.branch(1).say("Look for it.").read <= AROUND
