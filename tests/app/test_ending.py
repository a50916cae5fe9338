"""The app ends at once whatever it is doing, and leaves no document behind."""

import signal
import time
from pathlib import Path

import pytest
from gradio_client import handle_file

from tests.app.conftest import Server, client, serving, waited

# Seconds: by hand it takes one.
SOON = 60


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A page that takes long to be read."""
    path = tmp_path / "large.html"
    path.write_text("<p>A <b>heron</b> lives by the <i>water</i>.</p>\n" * 400_000)
    return path


def uploads(server: Server) -> list[Path]:
    return [*(server.data / "app" / "uploads").rglob("*.html")]


def read_by(server: Server, path: Path) -> None:
    """Have a document read, of which nobody waits for the end."""
    client(server).submit(handle_file(path), "", api_name="/read")
    waited(lambda: uploads(server))


@pytest.mark.long
def test_it_ends_while_a_model_is_loaded(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        begun = time.monotonic()
        assert server.end(signal.SIGTERM) == 0
        assert time.monotonic() - begun < SOON


@pytest.mark.long
def test_whether_killed_or_ended_no_document_is_left(
    tmp_path: Path, talker: Path, large: Path
) -> None:
    """Of one that was killed at the next start, which ends at once while it reads another."""
    with serving(tmp_path, "--model", str(talker)) as server:
        read_by(server, large)
        server.end(signal.SIGKILL)
    assert uploads(server)
    with serving(tmp_path, "--model", str(talker)) as server:
        assert uploads(server) == []
        read_by(server, large)
        begun = time.monotonic()
        assert server.end(signal.SIGTERM) == 0
        assert time.monotonic() - begun < SOON
    assert uploads(server) == []
