"""`kvlite chat`, played at a real terminal, and through pipes."""

import json
import os
import re
import signal
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from itertools import dropwhile
from pathlib import Path

import pexpect
import pytest
from rich.console import Console

from kvlite.cli.chat.terminal import ChatTerminal
from kvlite.cli.screen import guarded, stop_on_interrupt
from kvlite.conversation.session import Session
from tests.cli.conftest import Refused, Run, model_of, one_sentence

LONG = "--max-tokens=20000"
PROMPT, HINT = "\u203a ", "/help lists commands"
ARROW_UP, ALT_ENTER, CTRL_G = "\x1b[A", "\x1b\r", "\x07"


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers go on for as long as nobody ends them."""
    return model_of(tmp_path_factory.mktemp("roomy"), 32_768)


class Player:
    """Someone at the keyboard."""

    def __init__(self, child: "pexpect.spawn[str]", log: StringIO) -> None:
        self.child = child
        self.log = log

    def type(self, text: str) -> None:
        """Keys, and Enter."""
        self.child.send(text + "\r")

    def sees(self, *texts: str) -> None:
        """Each in turn, whatever lies between."""
        for text in texts:
            self.child.expect_exact(text)

    def sees_prompt(self) -> None:
        """The next message can be typed: the keyboard is read, key by key."""
        self.sees(PROMPT)
        end = time.monotonic() + 600
        while termios.tcgetattr(self.child.child_fd)[3] & termios.ICANON:
            assert time.monotonic() < end, "nobody reads the keyboard"
            time.sleep(0.01)

    @property
    def shown(self) -> str:
        """All that came so far, without colours and such."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]", "", self.log.getvalue())

    def ends(self) -> int:
        """How the program ended."""
        self.child.expect(pexpect.EOF)
        self.child.close()
        code = self.child.exitstatus
        assert code is not None, f"killed by {self.child.signalstatus}"
        return int(code)


@contextmanager
def playing(
    model: Path, data: Path, *args: object, command: str = "chat", columns: int = 90, **more: str
) -> Iterator[Player]:
    """The program in a terminal of its own."""
    own = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    own |= {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "KVLITE_DATA": str(data)}
    flags = [*map(str, args), "--model", str(model)]
    child = pexpect.spawn(
        sys.executable,
        ["-m", "kvlite", command, *flags],
        env={**own, **more},
        dimensions=(30, columns),
        timeout=600,
        encoding="utf-8",
    )
    log = StringIO()
    child.logfile_read = log
    try:
        yield Player(child, log)
    finally:
        child.close(force=True)


def said(data: Path) -> list[str]:
    """What was typed, on all days."""
    entries = (data / "chat-history").read_text().split("\n\n")
    lines = ([line[1:] for line in each.split("\n") if line.startswith("+")] for each in entries)
    return ["\n".join(each) for each in lines if each]


def test_typing(model: Path, text: Path, tmp_path: Path) -> None:
    """Several lines in three ways, an editor, history, completion, commands, a document."""
    editor = tmp_path / "editor"
    editor.write_text(f"#!{sys.executable}\nimport sys\nopen(sys.argv[1], 'a').write(' edited')\n")
    editor.chmod(0o755)
    saved = tmp_path / "talk.md"
    flags = (text, "--max-tokens", 3)
    with playing(model, tmp_path, *flags, EDITOR=str(editor), VISUAL=str(editor)) as player:
        player.sees("kvlite ", "512 tokens of context")
        player.sees("Read text.txt: ", " tokens. Your next message is about it.", HINT)
        player.type("Who sat?")
        player.sees("from ", " · ", "cut at 3 tokens")
        player.type('"""one')
        player.type("")
        player.type('two"""')
        player.sees("from ")
        player.sees_prompt()
        player.child.send("three" + ALT_ENTER)
        player.type("four")
        player.sees("from ")
        player.sees_prompt()
        player.child.send("\x1b[200~five\nsix\n\x1b[201~")
        player.type("seven")
        player.sees("from ")
        player.sees_prompt()
        player.child.send("eight" + CTRL_G)
        player.sees("edited")
        player.type("")
        player.sees("from ")
        player.sees_prompt()
        player.child.send("/mem\t")
        player.type("")
        player.sees("host memory: ", "weights", "The last answer's peak")
        player.type("/hlep")
        player.sees("did you mean /help?")
        player.sees_prompt()
        player.child.send(f"/save {saved.parent}/ta\t\x15")  # nothing is there to complete
        player.type(f"/save {saved}")
        player.sees("Saved as")
        player.type("/exit")
        assert player.ends() == 0
    users = re.findall(
        r"^## You\n\n(.*?)\n\n## Model$", saved.read_text(), re.DOTALL | re.MULTILINE
    )
    expected = ["one\n\ntwo", "three\nfour", "five\nsix\nseven", "eight edited"]
    assert users == ["*read text.txt*\n\nWho sat?", *expected]
    history = said(tmp_path)
    assert [each.strip('"') for each in history[1:5]] == expected
    assert history[5] == "/memory"
    assert (tmp_path / "chat-history").stat().st_mode & 0o077 == 0


@pytest.mark.long
def test_interrupts(roomy: Path, tmp_path: Path) -> None:
    """Ctrl-C keeps the part, at the prompt it quits when pressed twice; history of another day; and
    a terminal that becomes smaller while an answer comes."""
    (tmp_path / "chat-history").write_text("\n# 2026-01-01\n+Who sat?\n")
    with playing(roomy, tmp_path, LONG) as player:
        player.sees(HINT)
        player.type(ARROW_UP)
        player.sees("tokens/s")
        player.child.sendintr()
        player.sees("interrupted; the part is kept")
        player.sees_prompt()
        player.type("And then?")
        player.sees("tokens/s", "tokens/s")
        wide = len(player.log.getvalue())
        player.child.setwinsize(12, 44)
        for _ in range(5):
            player.sees("context ")
        player.child.sendintr()
        player.sees("interrupted; the part")
        player.sees_prompt()
        narrow = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", player.log.getvalue()[wide:])
        status = re.findall(r"context [^\r\n]*", narrow)[1:]
        status = [*dropwhile(lambda line: len(line) >= 44, status)]  # of before
        assert len(status) > 2 and max(map(len, status)) < 44
        player.child.setwinsize(30, 100)
        player.child.send("half a thou")
        player.sees("thou")
        player.child.send("\x03")
        player.sees_prompt()
        player.child.send("\x03")
        player.sees("Ctrl-C once more quits")
        player.sees_prompt()
        player.type("/metrics")
        player.sees("You ended it; what had come was kept.")
        player.sees_prompt()
        player.child.send("\x03")
        player.sees("Ctrl-C once more quits")
        player.sees_prompt()
        player.child.send("\x03")
        assert player.ends() == 0
    assert said(tmp_path) == ["Who sat?", "And then?", "/metrics"]


@pytest.mark.long
def test_lines_typed_while_an_answer_comes_follow_it(roomy: Path, tmp_path: Path) -> None:
    """Also if Ctrl-C ends it, with which terminals drop what was typed unless they are told."""
    with playing(roomy, tmp_path, LONG) as player:
        player.sees(HINT)
        player.type("One")
        player.sees("tokens/s")
        player.type("Two")
        player.type("/metrics")
        player.child.sendintr()
        player.sees("interrupted; the part is kept", "Two", "tokens/s")
        player.child.sendintr()
        player.sees("interrupted; the part is kept", "You ended it; what had come was kept.")
        player.sees_prompt()
        player.type("/exit")
        assert player.ends() == 0
    assert said(tmp_path) == ["One", "Two", "/metrics", "/exit"]


@pytest.mark.long
def test_questions_at_a_terminal(model: Path, text: Path, tmp_path: Path) -> None:
    """`kvlite ask` without one; Ctrl-D ends."""
    with playing(model, tmp_path, text, "--max-tokens", 3, command="ask") as player:
        player.sees("Ctrl-D ends")
        for question in ("Who sat", "Where"):
            player.sees("?")
            player.type(question)
            player.sees(question, "length limit")
        player.sees("?")
        player.child.send("\x04")
        assert player.ends() == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("environment", "columns", "rule"),
    [({"NO_COLOR": "1"}, 40, "no colour"), ({"TERM": "dumb"}, 80, "no control at all")],
)
def test_terminals_that_want_less(
    model: Path, tmp_path: Path, environment: dict[str, str], columns: int, rule: str
) -> None:
    flags = ("--max-tokens", 12, "--method", "full")
    with playing(model, tmp_path, *flags, columns=columns, **environment) as player:
        player.sees(PROMPT)
        player.type("Who sat?")
        player.sees("from all ")
        player.sees("cut at 12 tokens")
        player.type("/help")
        player.sees("/exit", "Ctrl-D")
        if rule == "no colour":  # the other one has its lines from the terminal
            player.sees_prompt()
        player.child.send("\x04")
        assert player.ends() == 0
    raw = player.log.getvalue()
    if rule == "no colour":
        styles = {
            part for found in re.findall(r"\x1b\[([0-9;]*)m", raw) for part in found.split(";")
        }
        assert styles <= {"", "0", "1", "2", "3", "4", "22", "23", "24", "39", "49"}
        help_ = player.shown.rpartition("/help [COMMAND]")[2].partition("Ctrl-D")[0]
        assert max(map(len, help_.split("\r\n"))) <= columns
    else:
        assert "\x1b" not in raw


@pytest.fixture
def typed(kvlite: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The program with lines on standard input."""

    def run(lines: str, *args: object) -> object:
        monkeypatch.setattr(sys, "stdin", StringIO(lines))
        return kvlite("chat", "--model", model, "--max-tokens", 4, *args)

    return run


@pytest.mark.long
def test_every_line_is_a_message(typed: Run, said: list[str]) -> None:
    done = typed("Who sat?\n\n  \n/help\nWhere?")
    assert said == ["Who sat?", "/help", "Where?"]
    assert (done.code, done.err, done.out.count("\n") >= 3) == (0, "", True)
    objects = [
        json.loads(line) for line in typed("Who sat?\n\n/help\nWhere?", "--json").out.splitlines()
    ]
    assert "\n".join([*(each["answer"] for each in objects), ""]) == done.out
    assert [each["generated_tokens"] for each in objects] == [4, 4, 4]
    assert objects[2]["seen_tokens"] > objects[1]["seen_tokens"] > objects[0]["seen_tokens"]


def test_a_line_that_cannot_be_answered_says_what_was_set_elsewhere(
    typed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLITE_RECALL", "ram")
    done = typed("Who sat?\n", "--method", "lminfinite")
    assert (done.code, done.out) == (2, "")
    assert "--recall ram has nothing to bring back" in done.err
    assert done.err.endswith("(--recall is from environment KVLITE_RECALL)\n")


def test_interrupted_between_lines(typed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    say = Session.say

    def interrupted(self: Session, line: str) -> object:
        begin = say(self, line)

        def begun(*given: object) -> object:
            signal.raise_signal(signal.SIGINT)
            return begin(*given)  # type: ignore[arg-type]

        return begun

    monkeypatch.setattr(Session, "say", interrupted)
    done = typed("Who sat?\nWhere?\n")
    assert (done.code, done.out) == (130, "")
    assert done.err == "Stopped while reading; nothing was answered.\n"


def test_nothing_to_answer(typed: Run) -> None:
    one_sentence(typed(" \n\n"), "standard input has no message", "| kvlite chat")


def test_bad_input(refused: Refused, tmp_path: Path) -> None:
    refused(["chat", "-"], "standard input is the conversation")
    refused(["chat", tmp_path / "none.pdf"], "none.pdf", "check the path")


def test_ctrl_c_between_two_things_ends_nothing() -> None:
    screen = Console(file=StringIO())
    terminal = ChatTerminal(screen, None, None, as_json=False, quiet=True)  # type: ignore[arg-type]
    before = signal.getsignal(signal.SIGINT)
    with guarded():
        signal.raise_signal(signal.SIGINT)
        with stop_on_interrupt() as stop:
            signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), terminal.leaving_on_interrupt("Loading"):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
