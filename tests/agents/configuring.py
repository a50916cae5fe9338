"""What `kvlite agent-config` says, put where it says."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit


def configure(
    name: str, address: str, model: Path, home: Path, env: dict[str, str]
) -> tuple[dict[str, str], list[str]]:
    """The variables that an agent is told, and the words that start it, if it says which; its files
    go into `home`, and what comes before it in the shell is done."""
    port = str(urlsplit(address).port)
    command = [sys.executable, "-m", "kvlite", "agent-config", name, "--json"]
    done = subprocess.run(
        [*command, "--model", str(model), "--port", port],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "KVLITE_CONFIG": str(home / "kvlite")},
    )
    told, words = dict[str, str](), list[str]()
    for step in json.loads(done.stdout)["steps"]:
        if found := re.search(r"~/([^\s,]+)", step["where"]):
            file = home / found[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(step["text"])
            continue
        if not step["where"].startswith("the shell"):
            continue
        *before, last = map(shlex.split, step["text"].splitlines())
        for line in before:
            if line[0] == "export":
                variable, _, value = line[1].partition("=")
                told[variable] = value
            else:
                subprocess.run(line, cwd=home, env=env, check=True, capture_output=True)
        words = last
    return told, words
