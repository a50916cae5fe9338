"""What needs no tensor imports no torch."""

import json
import subprocess
import sys
from pathlib import Path

from kvlite.config.settings import OPTIONS, flag_of
from tests.cli.conftest import Run

# Commands whose help has examples.
HELP = (
    *("ask", "methods", "config", "agent-config", "profile save", "library"),
    *(f"bench {each}" for each in ("niah", "ruler", "turns", "fidelity", "memory", "speed")),
    "bench attention",
)

# Runs commands one after the other in one interpreter, and says which libraries it then has.
_PROBE = """
import contextlib, json, sys
from kvlite.cli.main import main

for args in json.loads(sys.argv[1]):
    sys.argv = ["kvlite", *args]
    with contextlib.suppress(SystemExit):
        main()
    heavy = sorted({"torch", "transformers", "matplotlib", "openai"} & set(sys.modules))
    if heavy:
        sys.exit(f"{args} imports {heavy}")
"""


def test_what_needs_no_tensor_imports_no_torch(
    kvlite: Run, model: Path, tmp_path: Path, text: Path
) -> None:
    """Help, settings, what is refused, and the list of what the library has."""
    missing, data = str(tmp_path / "none.txt"), {"KVLITE_DATA": str(tmp_path / "data")}
    assert kvlite("read", text, "--model", model).code == 0
    commands = [
        *([*command.split(), "--help"] for command in HELP),
        ["methods", "kvx"],
        ["methods", "--json"],
        ["library"],
        ["library", "remove", "none"],
        ["library", "limit", "1GiB"],
        ["config"],
        ["profile", "save", "mine", "--budget", "9%"],
        ["config", "--profile", "mine", "--json"],
        ["ask", missing, "What?"],
        ["ask", str(tmp_path / "none.kv"), "What?"],
        ["chat", missing],
        ["read", missing],
        ["plan", "--doc", missing],
        ["calibrate", "--text", missing],
        ["bench", "fidelity", missing],
        ["ask", str(text), " "],
        ["ask", str(text), "What?", "--budget", "1B"],
        ["ask", str(text), "What?", "--model", "gpt-17"],
        ["app", "--vram", "0B"],
        ["agent-config", "codex"],
        ["agent-config", "none"],
    ]
    told = [sys.executable, "-c", _PROBE, json.dumps(commands)]
    folders = {**data, "KVLITE_CONFIG": str(tmp_path), "PATH": "", "COLUMNS": "300"}
    done = subprocess.run(told, capture_output=True, text=True, env=folders, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("kvlite: ") == 13
    assert "Traceback" not in done.stderr
    for command in HELP:
        assert done.stdout.count(f"kvlite {command} ") >= 2, command
    assert all(flag_of(name) in done.stdout for name in OPTIONS)
