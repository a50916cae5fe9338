from pathlib import Path

import pytest

from .files import Save


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def save(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return save
