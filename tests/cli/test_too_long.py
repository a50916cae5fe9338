"""What cannot fit the model is refused before it is read, or before a weight is."""

from pathlib import Path

import pytest

from kvlite.documents import opening
from tests.cli.conftest import LIMIT, Refused

COMMANDS = (("ask", "{}", "What?"), ("ask", "{}"), ("chat", "{}"), ("read", "{}"))


@pytest.mark.cases(3)
@pytest.mark.parametrize("command", [*COMMANDS, ("plan", "--doc", "{}")])
def test_large_file_is_refused_by_its_size(
    refused: Refused,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
) -> None:
    path = tmp_path / "long.txt"
    with path.open("wb") as file:
        file.write(b"It was a dark and stormy night. ")
        file.truncate(40 << 20)
    monkeypatch.setattr(opening, "_PIECE", 1 << 16)
    pieces, read = opening._pieces, []

    def watched(path: str, file: object) -> object:
        for piece in pieces(path, file):  # type: ignore[arg-type]
            read.append(len(piece))
            yield piece

    monkeypatch.setattr(opening, "_pieces", watched)
    args = [part.format(path) for part in command]
    refused([*args, "--model", model], "long.txt has 10,485,760 characters or more", "split it")
    assert sum(read) <= 4 << 16


@pytest.mark.cases(2)
@pytest.mark.parametrize("command", COMMANDS)
def test_long_text_is_refused_before_weights_are_read(
    refused: Refused, model: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("It was a dark and stormy night. " * 500)
    args = [part.format(path) for part in command]
    refused(
        [*args, "--model", model],
        "tokens of long.txt do not fit this model",
        f"trained for {LIMIT}",
    )
