"""Agents as their users install them, in a cache folder outside the repository."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

# The longest that one installation may take.
SECONDS = 600


def cache() -> Path:
    """Where agents and what they did are kept."""
    usual = Path.home() / ".cache" / "kvlite-agents"
    return Path(os.environ.get("KVLITE_AGENTS", usual))


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode:
        raise OSError(f"{' '.join(command[:3])} failed: {done.stderr.strip()[-400:]}")


def install_npm(name: str, package: str) -> tuple[Path, str]:
    """The folder of a package's programs, and its version."""
    folder = cache() / "npm" / name
    bare = package[:at] if (at := package.find("@", 1)) > 0 else package
    about = folder / "node_modules" / bare / "package.json"
    if not about.exists():
        if shutil.which("npm") is None:
            raise OSError("npm is not here")
        folder.mkdir(parents=True, exist_ok=True)
        # Without a file of its own, npm would install into a folder above.
        (folder / "package.json").write_text("{}")
        _run(["npm", "install", "--no-audit", "--no-fund", package], folder)
        # Newer npm leaves to users whether packages may run something; these have to.
        scripts = json.loads(about.read_text()).get("scripts", {})
        if script := scripts.get("postinstall"):
            _run(["sh", "-c", script], about.parent)
    return folder / "node_modules" / ".bin", json.loads(about.read_text())["version"]


def install_pip(name: str, packages: str) -> tuple[Path, str]:
    """The folder of a virtual environment's programs, and the first package's version."""
    folder = cache() / "pip" / name
    wanted, programs = packages.split(), folder / "bin"
    if not (folder / "installed").exists():
        _run([sys.executable, "-m", "venv", str(folder)], cache())
        _run([str(programs / "pip"), "install", "--quiet", *wanted], folder)
        (folder / "installed").touch()
    paths = [str(each) for each in folder.glob("lib/python*/site-packages")]
    first = wanted[0].partition("[")[0]
    found = next(each for each in distributions(path=paths) if each.name == first)
    return programs, found.version
