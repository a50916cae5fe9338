import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvlite.documents import reading

from .files import Save


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def save(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return save


@pytest.fixture
def in_child() -> None:
    """For tests of the process that reads a document."""


def here(work: Callable[..., object], *args: object, progress: object, **_: object) -> object:
    """As `run_in_child`, in this process."""
    return work(*args, progress=progress)


@pytest.fixture(autouse=True)
def in_this_process(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Other tests read here: a process takes longer to begin than a document to be read."""
    if "in_child" not in request.fixturenames:
        monkeypatch.setattr(reading, "run_in_child", here)
    deepest = sys.getrecursionlimit()
    yield
    sys.setrecursionlimit(deepest)
