"""`--stream` at the command line."""

from pathlib import Path

import pytest

from kvlite.model.shape import read_shape
from tests.cli.conftest import Refused, Run


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--stream ram --device cpu", ("--stream ram", "use --stream disk")),
        ("--stream disk --weights nf4", ("nf4", "leave --weights out")),
        ("--stream tape", ("'tape'", "off, ram, disk")),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_weight_is_read(
    refused: Refused, model: Path, text: Path, flags: str, named: tuple[str, ...]
) -> None:
    refused(["ask", text, "What?", "--model", model, *flags.split()], *named)


@pytest.mark.long
def test_the_embedded_model_answers_the_same_from_its_files(
    kvlite: Run, smollm_folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The cat sat on the mat, and the dog lay by the door.")
    flags = ("--model", smollm_folder, "--method", "full", "--max-tokens", "6", "--json", "-q")
    whole, ours = (
        kvlite("ask", text, "Where did the cat sit?", *flags, "--stream", setting).json()
        for setting in ("off", "disk")
    )
    assert ours["answer"] == whole["answer"] and len(ours["answer"]) > 5
    counts = read_shape(smollm_folder).parameters
    weights = 4 * (counts["attention"] + counts["mlp"] + counts["norms"] - 576)
    assert ours["streamed_bytes"] == ours["generated_tokens"] * weights
    assert "--stream disk brings 405.1 MiB of weights" in ours["notes"][0]
    assert (whole["streamed_bytes"], whole["notes"]) == (0, [])
