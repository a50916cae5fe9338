"""`kvlite calibrate`: what it leaves, what uses it, what it refuses."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import LIMIT, Refused, Run, one_sentence


@pytest.mark.long
def test_a_method_works_once_its_model_is_calibrated(
    kvlite: Run, model: Path, text: Path, data: Path
) -> None:
    ask = ["ask", text, "What?", "--model", model, "--method", "uncomp", "--budget", "60"]
    one_sentence(kvlite(*ask), "uncomp", "kvlite calibrate")
    made = kvlite("calibrate", model, "--samples", "2", "--tokens", "100", "--json")
    assert made.code == 0
    found = made.json()
    path = Path(found["path"])
    assert path.parent == data / "calibrations"
    assert json.loads(path.read_text())["head_ranks"] == found["head_ranks"]
    assert (found["samples"], found["tokens"], found["text"]) == (2, 100, "bundled prose")
    assert found["lazy_threshold"] is None
    done = kvlite(*ask, "--json", "--max-tokens", "3")
    assert done.code == 0
    assert 58 < done.json()["kept_entries_mean"] <= 60


def test_what_is_shown_and_where_it_is_put(
    kvlite: Run, model: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "mine.json"
    done = kvlite("calibrate", model, "--text", text, "--samples=1", "--tokens=90", "--out", out)
    assert done.code == 0 and out.is_file()
    assert str(out) in done.out.replace("\n", "")
    assert "no threshold for simlayerkv" in done.out.lower().replace("\n", " ")
    assert json.loads(out.read_text())["text"] == str(text)


@pytest.mark.parametrize(
    ("flags", "value", "remedy"),
    [
        ("--tokens 3", "3", "calibrate --help"),
        ("--samples 0", "0", "calibrate --help"),
        ("--text nowhere.txt", "nowhere.txt", "check the path"),
        ("--out nowhere/it.json", "nowhere/it.json", "no folder"),
        ("--device toaster", "'toaster'", "use auto, cpu or cuda"),
    ],
)
def test_bad_input(refused: Refused, model: Path, flags: str, value: str, remedy: str) -> None:
    refused(["calibrate", model, *flags.split()], value, remedy)


@pytest.mark.long
def test_pieces_that_fit_neither_the_text_nor_the_model(
    kvlite: Run, model: Path, text: Path
) -> None:
    flags = ["--text", text, "--tokens", LIMIT - 60]
    one_sentence(kvlite("calibrate", model, *flags), f"--tokens {LIMIT - 60}", "a longer one")
    one_sentence(kvlite("calibrate", model, "--tokens", "64000"), "--tokens 64000", "give 464")
