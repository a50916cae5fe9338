"""What is owed to a GPU runs: each part rehearsed on a CPU, with tiny models, and its tables."""

import json
from pathlib import Path

import pytest

from tests.gpu import __main__ as program
from tests.gpu.parts import PARTS
from tests.gpu.report import BEGIN, END, written_into

SLOW = ("equality", "methods", "suites", "long_documents", "quantized_weights", "other_weights")


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.long if each in SLOW else ()) for each in PARTS]
)
def test_a_part_runs(name: str, tmp_path: Path) -> None:
    program.run_here(name, tmp_path, rehearse=True)
    (part,) = program.read_all(tmp_path)
    assert part["finished"] and part["rows"]
    assert all(row.get("equal", True) in (True, None) for row in part["rows"])
    page = written_into(f"# Results\n{BEGIN}\nold\n{END}\nthe end", [part])
    assert page.count("\n| ") == len(part["rows"]) + 2 and "old" not in page
    assert page.startswith("# Results") and page.endswith("the end")


def test_what_is_finished_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "speed.json").write_text(json.dumps({"finished": True}))
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("it was run"))
    assert program.run_apart("speed", tmp_path, rehearse=True, again=False)
    assert capsys.readouterr().out == "speed: finished before\n"


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="has no <!-- gpu -->"):
        written_into("# Results", [])
