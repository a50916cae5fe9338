"""`kvlite methods` and the help."""

import dataclasses
import re

import pytest

from kvlite import __version__
from kvlite.config.settings import Settings
from kvlite.methods import METHODS
from tests.cli.conftest import Done, Run


def test_methods_as_json(kvlite: Run) -> None:
    done = kvlite("methods", "--json")
    rows = {row["name"]: row for row in done.json()["methods"]}
    assert list(rows) == list(METHODS)
    for name, row in rows.items():
        assert (row["summary"], row["paper"]) == (METHODS[name].summary, METHODS[name].paper)
        assert min(len(row["summary"]), len(row["paper"])) > 5
        assert row["frees_memory"] is (name not in ("full", "minference"))
        assert row["options"] == {
            f.name: f.default
            for f in dataclasses.fields(METHODS[name])
            if f.metadata.get("option", True)
        }
    assert (done.code, done.err) == (0, "")


def test_methods_in_two_columns_of_80_characters(
    kvlite: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = kvlite("methods")
    assert (done.code, done.err) == (0, "")
    rows = [line.split(maxsplit=1) for line in done.out.split("\n\n")[0].splitlines()]
    assert [(name, about.strip()) for name, about in rows] == [
        (name, method.summary) for name, method in METHODS.items()
    ]
    assert max(map(len, done.out.splitlines())) <= 80


def test_an_explained_method_fits_the_terminal(
    kvlite: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    *lines, defaults = kvlite("methods", "kvx").out.splitlines()
    assert max(map(len, lines)) <= 60
    assert '- middle="budget" (Eq. 6): a budget of C entries holds C/(2' in lines
    assert "    middle: which reading." in lines
    assert defaults.startswith("Defaults: --method kvx:")


def test_a_method_is_explained_with_every_option(kvlite: Run) -> None:
    for name in METHODS:
        done = kvlite("methods", name)
        assert (done.code, done.err) == (0, "")
        explained = re.findall(r"^    (\w+):", done.out, re.MULTILINE)
        assert sorted(explained) == sorted(METHODS[name].defaults())
        assert re.findall(r"\b(lines?|vot(e|es|ing)|stream)\b", done.out) == []


def test_help(kvlite: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    done = kvlite("--help")
    assert re.search(r"ask +Ask a question about", done.out)
    assert re.search(r"methods +List the methods", done.out)
    assert 'kvlite ask report.pdf "' in done.out
    assert (done.code, done.err) == (0, "")
    assert kvlite("--version") == Done(0, f"kvlite {__version__}\n", "")
    alone = kvlite()
    assert (alone.code, alone.out.split(), alone.err) == (2, done.out.split(), "")


def test_help_of_ask_shows_every_setting(kvlite: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    done = kvlite("ask", "--help")
    assert done.out.count("kvlite ask ") >= 4
    assert '| kvlite ask - "' in done.out
    shown = {line.split()[1]: line for line in done.out.splitlines() if "│ --" in line}
    for option in dataclasses.fields(Settings):
        about = option.metadata
        line = shown[about["flag"] or f"--{option.name.replace('_', '-')}"]
        assert about["help"].replace("`", "") in line.replace("`", "")
        for choice in about["choices"]:
            assert choice in line.replace(about["help"], "").partition("[default")[0]
    assert {"--json", "--quiet"} < set(shown)
    assert kvlite("methods", "--help").out.count("kvlite methods") == 4


def test_papers_of_methods(kvlite: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    rows = [line.split(maxsplit=1) for line in kvlite("methods", "--papers").out.splitlines()]
    found = {row[0]: row[1].strip() for row in rows if len(row) == 2}
    assert all(found[name] == method.paper for name, method in METHODS.items())
