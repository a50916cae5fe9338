"""What needs no tensor imports no torch, and what no model could do is refused before one is
looked for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Refused, Run, one_sentence

# Runs commands one after the other in one interpreter, and says which libraries it then has.
_PROBE = """
import contextlib, io, json, sys
from kvlite.cli.main import main

for args in json.loads(sys.argv[1]):
    sys.argv = ["kvlite", *args]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
    heavy = sorted({"torch", "transformers"} & set(sys.modules))
    if heavy:
        sys.exit(f"{args} imports {heavy}")
"""


@pytest.mark.long
def test_what_needs_no_tensor_imports_no_torch(tmp_path: Path, text: Path) -> None:
    missing = str(tmp_path / "none.txt")
    commands = [
        ["methods"],
        ["methods", "kvx"],
        ["methods", "--json"],
        ["library"],
        ["library", "remove", "none"],
        ["library", "limit", "1GiB"],
        ["config"],
        ["profile", "save", "mine", "--budget", "9%"],
        ["ask", missing, "What?"],
        ["ask", str(tmp_path / "none.kv"), "What?"],
        ["chat", missing],
        ["read", missing],
        ["plan", "--doc", missing],
        ["calibrate", "--text", missing],
        ["bench", "fidelity", missing],
        ["ask", str(text), " "],
        ["ask", str(text), "What?", "--budget", "1B"],
        ["ask", str(text), "What?", "--checkpoint-limit", "-1"],
        ["ask", str(text), "What?", "--model", "gpt-17"],
        ["read", str(text), "--kv-bits", "3"],
        ["chat", "--recall-limit", "much"],
        ["plan", "--method", "magic"],
        ["app", "--vram", "0B"],
    ]
    told = [sys.executable, "-c", _PROBE, json.dumps(commands)]
    folders = {"KVLITE_DATA": str(tmp_path), "KVLITE_CONFIG": str(tmp_path), "PATH": ""}
    done = subprocess.run(told, capture_output=True, text=True, env=folders, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("kvlite: ") == 16
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_the_library_lists_what_it_has_without_torch(
    kvlite: Run, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLITE_DATA", str(tmp_path / "data"))
    assert kvlite("read", text, "--model", model).code == 0
    told = [sys.executable, "-c", _PROBE, json.dumps([["library"], ["ask", str(text), ""]])]
    folders = {"KVLITE_DATA": str(tmp_path / "data"), "KVLITE_CONFIG": str(tmp_path), "PATH": ""}
    done = subprocess.run(told, capture_output=True, text=True, env=folders, check=False)
    assert (done.returncode, done.stderr.count("kvlite: ")) == (0, 1), done.stderr


@pytest.mark.cases(12)
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--checkpoint-limit=-1", ("--checkpoint-limit '-1'", "2GiB")),
        ("--recall-limit much", ("--recall-limit 'much'", "8GiB")),
        ("--vram 0B", ("--vram '0B'", "24GiB")),
        ("--budget 1B", ("--budget 1B", "64MiB")),
        ("--budget \u0663", ("--budget '\u0663'", "is not a budget")),
        ("--budget \u0663MiB", ("is not a budget",)),
        ("--vram \uff12GiB", ("is not a size",)),
        ("--top-k \u0663", ("'--top-k'", "integer")),
        ("--device cuda:\u0663", ("unknown device", "use auto, cpu or cuda")),
        ("--method kvx:omega=1,omega=2", ("'omega' twice", "give it once")),
        ("--method kvx:omega=\uff12", ("kvx:omega='\uff12'", "is not a number")),
        ("--method kvx:omega=0x10", ("kvx:omega='0x10'", "is not a number")),
        ("--method kvx:omega=1" + "0" * 400, ("kvx:omega='1000", "is not a number")),
        ("--method simlayerkv:threshold=1e400", ("threshold='1e400'", "is not a number")),
        ("--method " + "simlayerkv+" * 1000 + "kvx", ("holds too many methods",)),
        ("--method " + "x" * 1_000_000, ("unknown method 'xxx", "choose from full")),
        ("--method lminfinite --recall ram", ("lminfinite", "use --recall off")),
        ("--top-k 99999999999999999999", ("--top-k 99999999999999999999", "between 0 and")),
    ],
)
def test_settings_that_fit_no_model_are_refused_at_once(
    refused: Refused,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    named: tuple[str, ...],
) -> None:
    def read_document(*_: object, **__: object) -> None:
        raise AssertionError("a document would be read")

    monkeypatch.setattr("kvlite.cli.opening.read_document", read_document)
    refused(["ask", text, "What?", *flags.split()], *named)
    refused(["chat", text, *flags.split()], *named)


@pytest.mark.parametrize("question", ["", "   ", "\n\t"])
def test_an_empty_question_is_refused_at_once(refused: Refused, text: Path, question: str) -> None:
    refused(["ask", text, question], "is empty", 'kvlite ask report.pdf "')


def test_bytes_too_few_for_a_model_are_refused_before_a_weight_is_read(
    refused: Refused, model: Path, text: Path
) -> None:
    flags = ["--model", model, "--budget"]
    refused(["ask", text, "What?", *flags, "2KiB"], "--budget 2048 bytes is too little", "spans")
    refused(["chat", *flags, "90 bytes"], "--budget 90 bytes is too little", "give at least")


def test_a_default_method_is_not_named_by_its_options(refused: Refused, text: Path) -> None:
    refused(["ask", text, "What?", "--budget", "2"], "too small for spans")


@pytest.mark.long
def test_a_text_that_is_too_long_is_not_told_to_compact(
    kvlite: Run, model: Path, text: Path
) -> None:
    for times in (300, 97):  # beside what a template adds, the latter fits
        text.write_text("One word follows another. " * times)
        done = kvlite("ask", text, "What?", "--model", model)
        one_sentence(done, "do not fit this model", "split it", "--model")
        assert "compact" not in done.err
    done = kvlite("ask", text, "What?", "--model", model, "--beyond-context", "compact")
    one_sentence(done, "split it", "compact forgets earlier messages, and no part of a new one")
