"""`kvlite bench`: every command runs, goes on where it was stopped, and refuses what it must."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlite.bench.folder import RunFolder
from tests.cli.conftest import LIMIT, Refused, Run
from tests.cli.test_interrupts import interrupted

NIAH = "--tokens 300 --depths 2 --kind number --budget 40 --budget 60 --method snapkv:window=8"
RULER = "--tokens 300 --task single --task variables --budget 60 --repeats 2 --method h2o"
GRIDS = {
    "niah": (NIAH, 2 * (1 + 2 + 2)),
    "niah --question unknown --recall off,20 --recall-bits 16,4": (NIAH, 2 * (1 + 2 * 3 + 2)),
    "ruler --recall 20": (RULER, 2 * 2 * 3),
    "fidelity --recall off,20": (
        "--tokens 200 --after 20 --budget 60 --method snapkv --method lminfinite:limit=false "
        "--repeats 2",
        2 * (1 + 2 + 1 + 1),
    ),
    "turns --orders 2": (
        "--tokens 250 --questions 2 --budget 60 --method snapkv --recall off,20",
        2 * 2 * (1 + 2 + 1),
    ),
    "memory": ("--tokens 200 --budget 60 --method snapkv", 3),
    "attention": ("--tokens 200 --repeats 2", 2 * 4),
    "speed": ("--tokens 200 --budget 60 --method snapkv --repeats 1 --new-tokens 3", 1),
}


def words(command: str, model: Path) -> list[object]:
    return ["bench", *command.split(), *GRIDS[command][0].split(), "--model", model]


@pytest.mark.cases(1)
@pytest.mark.parametrize("command", GRIDS)
def test_a_run_leaves_rows_a_table_and_plots(
    kvlite: Run, model: Path, tmp_path: Path, command: str
) -> None:
    out = tmp_path / "run"
    done = kvlite(*words(command, model), "--out", out, "--json")
    report = done.json()
    assert done.code == 0
    assert len(report["rows"]) == GRIDS[command][1]
    assert report["machine"]["torch"] == torch.__version__
    assert report["folder"] == str(out)
    assert [json.loads(line) for line in (out / "rows.jsonl").open()] == report["rows"]
    config = json.loads((out / "config.json").read_text())
    assert (config["command"], config["model"]["name"]) == (command.split()[0], str(model))
    if command not in ("attention", "speed"):
        methods = {row["method"] for row in report["rows"]}
        assert "full" in methods
        assert any(method.startswith("random") for method in methods)
    table = (out / "table.md").read_text()
    assert "Wilson" in table and "| --- |" in table
    assert table.count("\n|") >= 3 and report["machine"]["processor"] in table
    plots = list(out.glob("*.png"))
    assert bool(plots) is (command.split()[0] not in ("memory", "speed", "attention"))
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)
    names = {plot.stem for plot in plots}
    if command == "niah":
        assert names == {"quality-number-known"}


def test_a_table_by_default_in_a_folder_of_its_own(
    kvlite: Run, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # which breaks nothing where there is no terminal
    done = kvlite(*words("memory", model))
    (folder,) = (data / "bench").iterdir()
    assert re.fullmatch(r"memory-\d{4}-\d\d-\d\d-\d{6}", folder.name)
    assert done.err == f"Rows, table and plots: {folder}\n"
    assert "share of full's peak" in done.out and "snapkv" in done.out
    # What is the same in all lines is said once.
    head, caption = (
        done.out.split("━┓", 1)[1].split("┡")[0],
        done.out.split("━┛")[-1].split("└")[-1],
    )
    assert "tokens" not in head and "tokens " in caption


@pytest.mark.long
def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(
    kvlite: Run, model: Path, tmp_path: Path
) -> None:
    """Before the last of ten rows is kept."""
    out = tmp_path / "run"
    args = [*words("niah", model), "--out", out]
    first = interrupted("kvlite.bench.folder", "RunFolder", "add", 10, *args)
    kept = (out / "rows.jsonl").read_text()
    assert (first.code, len(kept.splitlines())) == (130, 9)
    assert "Stopped after 9 of 10 rows. To go on: kvlite bench niah" in first.err
    assert f"--out {out}" in first.err
    assert "Stopped after 9 of 10 rows." in (out / "table.md").read_text()
    second = kvlite(*args, "--json")
    assert second.code == 0
    assert "Stopped" not in (out / "table.md").read_text()
    whole = kvlite(*words("niah", model), "--out", tmp_path / "whole", "--json")
    assert second.json()["rows"] == whole.json()["rows"]


def test_another_run_in_a_folder_is_refused(
    kvlite: Run, refused: Refused, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert kvlite(*words("memory", model), "--out", out).code == 0
    refused([*words("memory", model), "--budget", "70", "--out", out], out, "options.budgets", "70")
    other = ("--weights", "nf4", "--out", out)
    refused([*words("memory", model), *other], out, "options.weights", "nf4")
    refused(
        [*words("ruler --recall 20", model), "--out", out], out, "command 'memory', not 'ruler'"
    )


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("niah --kind verse", ("--kind 'verse'", "number, sentence, pairs")),
        ("ruler --task sums", ("--task 'sums'", "multi-key")),
        ("niah --recall lots", ("--recall 'lots'", "give 128, or 0")),
        ("fidelity --recall 20 --recall-bits 5", ("--recall-bits '5'", "16, 8, 4")),
        ("niah --method magic", ("'magic'", "choose from full,")),
        ("memory --method snapkv --budget 8", ("budget of 8", "give it at least")),
        ("niah --tokens 50", ("'--tokens'", "see `kvlite bench niah --help`")),
        ("speed --budget nothing", ("'nothing'", "give entries (512)")),
    ],
)
def test_bad_options(refused: Refused, args: str, named: tuple[str, ...]) -> None:
    refused(["bench", *args.split()], *named)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ("niah --tokens 600", f"--tokens 600 is too long: give up to {LIMIT - 128}"),
        ("fidelity --tokens 400 --after 200", f"--after 200 are too many: give up to {LIMIT}"),
        ("ruler --tokens 100 --task multi-query", "--tokens 100 is too short for ruler multi-qu"),
        ("memory --tokens 513", f"--tokens 513 is too long: give up to {LIMIT}"),
        ("attention --tokens 600", f"--tokens 600 is too long: give up to {LIMIT} (the text has"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_no_folder(
    kvlite: Run, model: Path, data: Path, args: str, sentence: str
) -> None:
    budget = [] if args.startswith("attention") else ["--budget", "64"]
    done = kvlite("bench", *args.split(), *budget, "--model", model)
    assert (done.code, done.out) == (2, "")
    assert sentence in done.err
    assert not data.exists()


def test_fidelity_of_a_users_text(kvlite: Run, model: Path, text: Path, tmp_path: Path) -> None:
    flags = "--tokens 150 --after 9 --repeats 1 --budget 50 --method snapkv --json"
    args = ["bench", "fidelity", text, *flags.split(), "--model", model, "--out", tmp_path / "run"]
    rows = kvlite(*args).json()["rows"]
    assert [row["scored"] for row in rows] == [8, 8, 8]
    assert (rows[0]["kl"], rows[0]["agreement"], rows[0]["attention_kept"]) == (
        0,
        1,
        pytest.approx(1),
    )
    text.write_text("Something else. " * 100)
    done = kvlite(*args)
    assert (done.code, "options.text" in done.err) == (2, True)


def test_rows_are_kept_as_they_come(
    kvlite: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill right after a row leaves that row on the disk, and the configuration before it; what
    is given twice is measured once."""
    out, seen = tmp_path / "run", []
    add = RunFolder.add

    def watched(self: RunFolder, row: Any) -> None:
        assert (out / "config.json").exists()
        add(self, row)
        seen.append(len((out / "rows.jsonl").read_text().splitlines()))

    monkeypatch.setattr(RunFolder, "add", watched)
    twice = ["--tokens", "200", "--budget", "60", "--method", "snapkv"]
    assert kvlite(*words("memory", model), *twice, "--out", out).code == 0
    assert seen == [1, 2, 3]
