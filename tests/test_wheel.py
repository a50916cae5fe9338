"""What is installed: a wheel built from the checkout, looked into and run from elsewhere."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
LEFT_BEHIND = shutil.ignore_patterns(
    ".*", "*.egg-info", "__pycache__", "build", "dist", "node_modules", "shared"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy of the checkout, offline, by the setuptools that is installed here."""
    place = tmp_path_factory.mktemp("wheel")
    checkout = shutil.copytree(ROOT, place / "checkout", ignore=LEFT_BEHIND)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--wheel-dir", str(place / "dist"), str(checkout)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (file,) = (place / "dist").iterdir()
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    with ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.long
def test_the_wheel_installs_kvlite_its_app_and_nothing_else(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    info = f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info"
    assert tops == {"kvlite", "kvlite_app", info}
    packaged = {name for name in names if name.startswith("kvlite/")}
    source = [path for path in (ROOT / "kvlite").rglob("*") if path.is_file()]
    expected = {str(p.relative_to(ROOT)) for p in source if "__pycache__" not in p.parts}
    assert packaged == expected
    page = {
        name.replace("kvlite_app/", "app/", 1) for name in names if name.startswith("kvlite_app/")
    }
    files = [path for path in (ROOT / "app").rglob("*") if path.is_file()]
    assert page == {str(p.relative_to(ROOT)) for p in files if "__pycache__" not in p.parts}
    assert {"kvlite/py.typed", "kvlite/bench/prose.txt", "kvlite/__init__.py"} <= packaged
    assert f"{info}/licenses/LICENSE" in names


@pytest.mark.long
def test_the_wheel_says_what_it_is(installed: Path) -> None:
    (info,) = installed.glob("*.dist-info")
    commands = (info / "entry_points.txt").read_text().split()
    assert commands == ["[console_scripts]", "kvlite", "=", "kvlite.__main__:main"]
    metadata = (info / "METADATA").read_text(encoding="utf-8")
    assert "\nName: kvlite\n" in metadata and "\nLicense-Expression: Apache-2.0\n" in metadata
    assert (ROOT / "README.md").read_text(encoding="utf-8").strip() in metadata
    assert (info / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


RUN = """
import sys
import kvlite
print(kvlite.__file__)
from kvlite.cli.main import main
sys.argv = ["kvlite", "methods", "--json"]
main()
"""


def test_the_wheel_runs_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    where, listed = run.stdout.splitlines()
    assert Path(where) == installed / "kvlite" / "__init__.py"
    names = [method["name"] for method in json.loads(listed)["methods"]]
    assert names[0] == "full" and "kvx" in names
