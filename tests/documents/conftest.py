from collections.abc import Callable
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
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that change what the reading process does."""

    def here(work: Callable[..., object], *args: object, progress: object, **_: object) -> object:
        return work(*args, progress=progress)

    monkeypatch.setattr(reading, "run_in_child", here)
