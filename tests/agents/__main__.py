"""Real coding agents, with their defaults, at a running server: `python -m tests.agents [NAME]`.

Each is installed into a cache folder (KVLITE_AGENTS, else ~/.cache/kvlite-agents), told of the
server by `kvlite agent-config`, and given a task in a folder of its own: to read a file and to
change it. The model is a tiny random one with a long context; a stand-in says what it says. All
else is as ever. With `--model` a model speaks for itself, and need only be heard. What was sent and
answered lies in the cache folder's `requests`.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvlite.config.settings import Settings
from kvlite.server.config import ServerConfig
from tests.agents.configuring import configure
from tests.agents.install import cache
from tests.agents.recording import Recording, recording
from tests.agents.stand_in import StandIn, speaking, standing_in
from tests.agents.table import AFTER, AGENTS, BEFORE, Agent
from tests.cli.conftest import model_of
from tests.server.conftest import Server, serving
from tests.server.test_tools import TEMPLATE

CONTEXT = 131_072
# The longest that an agent may take; and with a model that speaks for itself.
SECONDS, SPEAKING = 300, 1800


@dataclass
class Row:
    """What came of an agent; tokens and seconds are of the task's first two prompts.

    Attributes:
        again: tokens of the second prompt that were read, of those that the first had.
        why: what is wrong, or why it was skipped.
    """

    agent: str
    version: str = ""
    answered: bool = False
    done: bool = False
    prompt: int = 0
    first_s: float | None = None
    second_s: float | None = None
    again: int | None = None
    skipped: bool = False
    why: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Of the table."""
        if self.skipped:
            return f"{self.agent:12} {'skipped':>10}: {self.why[0]}"
        times = [
            f"{each:.1f}" if each is not None else "" for each in (self.first_s, self.second_s)
        ]
        again = "" if self.again is None else str(self.again)
        yes = ["yes" if each else "NO" for each in (self.answered, self.done)]
        shown = f"{yes[0]:>8} {yes[1]:>5} {self.prompt:>7} {times[0]:>8} {times[1]:>9} {again:>6}"
        return f"{self.agent:12} {self.version:>10} {shown}"


HEAD = f"{'agent':12} {'version':>10} answered  loop  prompt  first s  second s  again"


def main() -> int:
    """Try agents, and name what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.agents")
    known = [each.name for each in AGENTS]
    parser.add_argument("agents", nargs="*", metavar="AGENT", help=", ".join(known))
    parser.add_argument("--model", help="one that speaks for itself, such as a GGUF file")
    parser.add_argument("--context", type=int, default=CONTEXT, help="the model's, in tokens")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if strange := [each for each in given.agents if each not in known]:
        parser.error(f"no agent is called {strange[0]!r}: give {', '.join(known)}")
    cache().mkdir(parents=True, exist_ok=True)
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "tiny").mkdir()
        if given.model:
            model, voice = Path(given.model).resolve(), speaking()
        else:
            model = model_of(folder / "tiny", given.context)
            (model / "chat_template.jinja").write_text(TEMPLATE)
            voice = standing_in(str(model))
        settings = Settings(model=str(model), reserve_tokens=2048, max_new_tokens=256)
        config = ServerConfig(folder=folder / "data")
        with (
            recording(folder) as recorded,
            voice as rules,
            serving(settings, config) as server,
        ):
            for agent in AGENTS:
                if agent.name in (given.agents or known):
                    home = folder / agent.name
                    rows.append(
                        _try(agent, server, rules, recorded, home, model, speaks=bool(given.model))
                    )
                    print(rows[-1].line(), *rows[-1].why, sep="\n  ", file=sys.stderr, flush=True)
    if given.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print("\n".join([HEAD, *(row.line() for row in rows)]))
    return any(row.why and not row.skipped for row in rows)


def _try(
    agent: Agent,
    server: Server,
    rules: StandIn,
    recorded: Recording,
    home: Path,
    model: Path,
    *,
    speaks: bool,
) -> Row:
    row = Row(agent.name)
    try:
        programs, row.version = agent.install(agent.name, agent.package)
    except (OSError, subprocess.TimeoutExpired) as error:
        row.skipped, row.why = True, [f"it cannot be installed: {error}"]
        return row
    work = home / "work"
    work.mkdir(parents=True)
    note = work / "note.txt"
    note.write_text(BEFORE)
    recorded.begin(cache() / "requests" / agent.name)
    rules.begin([each.replace("PATH", str(note)) for each in agent.answers], agent.mark)
    env = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(home),
        "TERM": "dumb",
        "NO_PROXY": "127.0.0.1",
        "DO_NOT_TRACK": "1",
        **dict(agent.env),
    }
    words: list[str] = []
    if agent.told:
        told, words = configure(agent.name, server.address, model, home, env)
        env |= told
    else:
        address = {"OPENAI_BASE_URL": f"{server.address}/v1", "OPENAI_API_KEY": "any"}
        env |= address | {"MODEL": model.name}
    command = [*(words or agent.command[:1]), *agent.command[1:]]
    code, said = _run(command, work, env, SPEAKING if speaks else SECONDS)
    (recorded.folder / "said.txt").write_text(said)
    main_asks = [each for each in rules.asked if each.step is not None]
    ended = [each for each in main_asks if each.seconds is not None]
    row.answered = bool(ended) or (speaks and any(each.first_s for each in main_asks))
    row.done = code == 0 and note.read_text() == AFTER
    if main_asks:
        row.prompt = (max if speaks else min)(each.tokens for each in main_asks)
    if speaks:  # as long as it likes
        heard = [each for each in main_asks if each.first_s and 2 * each.tokens > row.prompt]
        row.first_s = heard[0].first_s if heard else None
    elif ended:
        row.first_s = ended[0].seconds
    if len(ended) > 1:
        first, second = ended[:2]
        row.second_s = second.seconds
        row.again = max(0, first.tokens - (second.tokens - (second.fresh or 0)))
    row.why += recorded.refused[:5]
    row.why += [f"the grammar forbids {each!r}" for each in rules.forbidden]
    if not (row.done or (speaks and row.answered)):
        row.why += [f"it ended with {code}; note.txt: {note.read_text()!r}", said[-600:]]
    shutil.rmtree(home, ignore_errors=True)
    return row


def _run(
    command: list[str], folder: Path, env: dict[str, str], most: int
) -> tuple[int | None, str]:
    """Its exit code, None if it was killed, and what it printed."""
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        began = time.monotonic()
        try:
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(most)
        finally:
            _end(child, env["HOME"])
        out.seek(0)
        said = out.read().decode(errors="replace")
        return code, f"{said}\n({time.monotonic() - began:.0f} s)"


def _end(child: subprocess.Popen[bytes], home: str) -> None:
    """End what an agent has started; a daemon has left its group, but not its home."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"HOME={home}".encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


if __name__ == "__main__":
    failed = main()
    sys.stdout.flush()
    os._exit(failed)  # at the usual end, triton lists what it leaks
