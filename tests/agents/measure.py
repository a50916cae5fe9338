"""What agents wait for at a server of its own process: `python -m tests.agents.measure WHAT MODEL`.

`turns`: ten turns of one agent, then the whole history read anew. `two`: two agents that answer and
read at once. `clients`: twenty agents for some minutes, with the server's memory.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.agents.history import Agent, Figures, ask
from tests.attack.process import Served, served
from tests.cli.conftest import model_of
from tests.server.test_tools import TEMPLATE


def turns(server: Served, name: str, lines: int) -> dict[str, Any]:
    """Ten turns with twenty tools, each after a result of so many lines but the last; and the
    first token of the last prompt by a server that knows nothing of it."""
    main, rows = Agent(server.address, name), list[Figures]()
    for turn in range(9):
        main.result(turn, lines)
        rows.append(main.say(f"What is the scale of value_{turn}004? Answer in few words."))
    rows.append(main.say("Which of these was the largest? Answer in few words."))
    other = replace(main, messages=[{"role": "system", "content": "Other. "}, *main.messages[1:-1]])
    anew = ask(server.address, name, other.messages, main.tools)
    return {
        "turns": [[each.tokens, each.read, round(each.first_s, 2)] for each in rows],
        "anew": [anew.tokens, anew.read, round(anew.first_s, 2)],
        "share": round(rows[-1].first_s / anew.first_s, 4),
    }


def two(server: Served, name: str, lines: int) -> dict[str, Any]:
    """The longest gaps of an answer while another agent's prompt is read."""
    first, second = (Agent(server.address, name, f"You are agent {n}.") for n in range(2))
    first.answer_tokens = 200
    first.result(0, 4)
    found = list[Figures]()
    talking = threading.Thread(
        target=lambda: found.append(first.say("Write a long story about a scale."))
    )
    talking.start()
    time.sleep(5)
    second.result(1, lines)
    read = second.say("What is in it?")
    talking.join()
    gaps = sorted(found[0].gaps_s)
    return {
        "answer": [found[0].tokens, len(gaps) + 1],
        "read beside it": [read.tokens, read.read, round(read.first_s, 2)],
        "gaps_s": {"median": round(statistics.median(gaps), 3), "longest": round(gaps[-1], 3)},
        "longest_s": [round(each, 3) for each in gaps[-5:]],
    }


def clients(server: Served, name: str, lines: int, minutes: float) -> dict[str, Any]:
    """Twenty agents with histories of their own, begun anew after some turns."""
    end, lock = time.monotonic() + 60 * minutes, threading.Lock()
    done, wrong, waits = 0, list[str](), list[float]()
    memory = list[int]()

    def work(number: int) -> None:
        nonlocal done
        life = 0
        while time.monotonic() < end:
            agent = Agent(server.address, name, f"You are agent {number}, {life}.")
            before, life = 0, life + 1
            for turn in range(5):
                agent.result(turn, lines)
                try:
                    asked = agent.say(f"What is in file {turn}?")
                except Exception as error:
                    with lock:
                        wrong.append(f"{type(error).__name__}: {error}"[:300])
                    break
                with lock:
                    done += 1
                    waits.append(asked.first_s)
                    if not asked.answer["content"] and not asked.answer.get("tool_calls"):
                        wrong.append("an answer is empty")
                    if asked.read > asked.tokens - before:
                        wrong.append(f"{asked.read} read of {asked.tokens}, {before} before")
                before = asked.tokens

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(20)]
    for each in threads:
        each.start()
    while any(each.is_alive() for each in threads):
        time.sleep(10)
        memory.append(server.memory() >> 20)
    return {
        "answers": done,
        "wrong": len(wrong),
        "first": wrong[:5],
        "first_s": {"median": round(statistics.median(waits), 2), "longest": round(max(waits), 2)},
        "MiB": memory,
    }


def main() -> None:
    """Measure one thing."""
    parser = argparse.ArgumentParser(prog="python -m tests.agents.measure")
    parser.add_argument("what", choices=["turns", "two", "clients"])
    parser.add_argument("model", help="a folder or a file, or `tiny`: random, of 32,768 tokens")
    parser.add_argument("--lines", type=int, default=60, help="of a tool's result")
    parser.add_argument("--minutes", type=float, default=5)
    given, given.options = parser.parse_known_args()  # others are the server's
    with tempfile.TemporaryDirectory() as made:
        folder, model = Path(made), Path(given.model)
        if given.model == "tiny":
            model = folder / "tiny"
            model.mkdir()
            model_of(model, 32_768)
            (model / "chat_template.jinja").write_text(TEMPLATE)
        options = "--method", "spans", *given.options
        with served(model, folder / "data", *options, threads=os.cpu_count() or 1) as server:
            with server.http as http:
                name = http.get("/v1/models").json()["data"][0]["id"]
            if given.what == "turns":
                found = turns(server, name, given.lines)
            elif given.what == "two":
                found = two(server, name, given.lines)
            else:
                found = clients(server, name, given.lines, given.minutes)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
