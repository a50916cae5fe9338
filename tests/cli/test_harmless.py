"""Nothing from outside tells a terminal what to do."""

import json
import re
import sys
import unicodedata
from io import StringIO
from pathlib import Path

import pytest
from rich.markdown import Markdown
from rich.table import Table

from kvlite.cli.console import Screen
from kvlite.cli.screen import ReadingBar
from kvlite.errors import LONGEST, KvliteError
from kvlite.printable import escaped, harmless
from tests.cli.conftest import Run

HOSTILE = "\x1b]0;owned\x07\x1b[31m\x9b2Jevil\u202etxt.\u2066[red]:smile:[link=http://a]x[/link]"
# Rich's own sequences on a terminal: colours, the cursor, and lines that are wiped.
_OWN = re.compile(r"\x1b\[(\d+(;\d+)*)?[mAKJ]|\x1b\[\?25[lh]|\x1b\[2K|\r")


def require_harmless(text: str) -> None:
    """Check that nothing but ends of lines and tabs is obeyed, and nothing changes direction."""
    for each in set(text) - set("\n\t"):
        kind = unicodedata.category(each)
        assert kind != "Cc" and each not in "\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066", (
            f"{each!r} in {text!r}"
        )


def test_every_control_character_is_taken_out() -> None:
    for code in range(0x10000):
        require_harmless(harmless(chr(code)))


def test_marks_that_languages_need_stay() -> None:
    for text in (
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        "\U0001f469\u200d\U0001f4bb",
        "a\tb\nc",
        "\u05d0\u200f!",
    ):
        assert harmless(text) == text
    assert harmless("a\r\nb\rc") == "a\nb\ufffdc"


def test_escaped_json_says_the_same() -> None:
    text = json.dumps({"said": HOSTILE}, ensure_ascii=False)
    require_harmless(escaped(text))
    assert json.loads(escaped(text)) == {"said": HOSTILE}


def _doors(folder: Path) -> list[list[str]]:
    """Commands with hostile names and values at each place where there may be some."""
    bad = HOSTILE.replace("/", "_")
    there, saved = folder / f"{bad}.txt", folder / f"{bad}.kv"
    there.write_bytes(b"\x7fELF\0\1")
    saved.write_bytes(b"no snapshot")
    files = [str(there), str(folder / f"no{bad}"), str(saved)]
    settings = ("model", "method", "budget", "kv-bits", "recall", "device", "vram", "top-k")
    asked = [["ask", str(there), "What?", f"--{name}", HOSTILE] for name in settings]
    return [
        *asked,
        *([command, *more] for command in ("ask", "chat", "read") for more in ([f] for f in files)),
        ["ask", HOSTILE, "-", "a", "b"],
        ["plan", HOSTILE],
        ["plan", "--doc", files[0]],
        ["plan", str(folder)],
        ["calibrate", "--text", files[1]],
        ["calibrate", "--out", f"{bad}/{bad}"],
        ["read", str(there), "--out", f"{bad}"],
        ["read", str(there), "--name", HOSTILE],
        ["methods", HOSTILE],
        ["library"],
        ["library", "remove", HOSTILE],
        ["library", "limit", HOSTILE],
        ["config", "--system", HOSTILE, "--stop", HOSTILE],
        ["config", "--profile", HOSTILE],
        ["profile", "save", HOSTILE, "--top-k", "1"],
        ["profile", "save", "mine", "--system", HOSTILE],
        ["bench", "niah", "--method", HOSTILE],
        ["bench", "fidelity", files[1]],
        ["app", "--host", HOSTILE],
        ["app", "--auth", HOSTILE.replace(":", "")],
        ["app", "--port", HOSTILE],
        [HOSTILE],
        ["ask", f"--{HOSTILE}"],
        ["config", "--json", "--system", HOSTILE],
        ["config", "--profile", "mine", "--json"],
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a hostile name that holds kvlite's own, with a broken profile and an entry."""
    folder = tmp_path / HOSTILE.replace("/", "_")
    (folder / "profiles").mkdir(parents=True)
    (folder / "library").mkdir()
    (folder / "profiles" / "broken.toml").write_text(f"{json.dumps(HOSTILE)} = 1\n")
    (folder / "library" / f"evil{HOSTILE.replace('/', '_')}.kv").write_bytes(b"no snapshot")
    (folder / "config.json").write_text(json.dumps({"model_type": HOSTILE}))
    for name in ("KVLITE_CONFIG", "KVLITE_DATA"):
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setenv(f"KVLITE_{HOSTILE.replace(chr(61), chr(45))}", "1")
    return folder


@pytest.mark.long
def test_no_command_prints_what_a_terminal_obeys(kvlite: Run, folder: Path) -> None:
    for args in _doors(folder):
        done = kvlite(*args)
        require_harmless(done.out)
        require_harmless(done.err)
        assert "Traceback" not in done.err, args


def test_a_mistake_is_shown_without_what_it_quotes(
    kvlite: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(HOSTILE)

    monkeypatch.setattr("kvlite.cli.main.app", fail)
    done = kvlite("methods")
    assert done.code == 1 and "RuntimeError" in done.err and "evil" in done.err
    require_harmless(done.err)


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_answers_are_harmless_on_a_terminal_and_exact_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvlite.cli.console import write

    write(HOSTILE)
    assert capsys.readouterr().out == HOSTILE
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    write(HOSTILE)
    require_harmless(capsys.readouterr().out)


def _shown(draw: str) -> str:
    """What a terminal gets, without rich's own sequences."""
    file = StringIO()
    screen = Screen(file=file, force_terminal=True, width=400, legacy_windows=False)
    if draw == "table":
        table = Table(HOSTILE, title=HOSTILE, caption=HOSTILE)
        table.add_row(HOSTILE)
        screen.print(table)
    elif draw == "markdown":
        screen.print(Markdown(f"[{HOSTILE}](http://x/\x1b) `{HOSTILE}`"))
    elif draw == "out":
        screen.out(HOSTILE)
    elif draw == "status":
        with screen.status(HOSTILE) as status:
            status.update(HOSTILE)
    elif draw == "bar":
        bar = ReadingBar(screen, HOSTILE)
        bar.update(1, 2)
        bar.note(HOSTILE)
        bar.close()
    else:
        screen.print(HOSTILE, style="red")
    return file.getvalue()


@pytest.mark.parametrize("draw", ["table", "markdown", "out", "status", "bar", "text"])
def test_whatever_is_drawn_obeys_nothing(draw: str) -> None:
    shown = _shown(draw)
    assert "evil" in shown
    require_harmless(_OWN.sub("", shown))
    if draw != "markdown":
        assert "[red]:smile:" in shown


def test_an_error_is_one_line_whatever_it_names() -> None:
    said = str(KvliteError(f"{HOSTILE}\nkvlite: all is well\r\n{'x' * 9999}: give another"))
    require_harmless(said)
    assert "\n" not in said and len(said) <= LONGEST + 10 and said.endswith(": give another")
