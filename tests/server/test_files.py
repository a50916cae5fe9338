"""Documents by upload and by name, asked about with OpenAI's client; nothing else is opened."""

import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvlite.config.settings import Settings
from kvlite.conversation.entries import add_document
from kvlite.conversation.library import Library
from kvlite.documents import Document
from kvlite.model.chat_template import all_of, question_about
from kvlite.server import files
from kvlite.server.config import ServerConfig
from tests.server.conftest import Server, said, serving
from tests.server.test_refusing import require_error

TEXT = "A crane stands on one leg in the water. " * 30
CHAT = "/v1/chat/completions"


@pytest.fixture
def own(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with a library of its own."""
    monkeypatch.setenv("KVLITE_DATA", str(tmp_path / "data"))
    with serving(settings, ServerConfig()) as found:
        yield found


def test_files_for_what_is_not_here_are_refused(own: Server) -> None:
    for purpose in ("batch", "fine-tune", "x" * 300):
        form = {"files": {"file": ("crane.md", TEXT)}, "data": {"purpose": purpose}}
        error = require_error(own.http.post("/v1/files", **form), 400, "send user_data")  # type: ignore[arg-type]
        assert error["param"] == "purpose"
    assert own.client.files.list().data == []


def test_a_damaged_upload_hides_no_other_and_a_full_disk_is_said(
    own: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = own.client.files.create(file=("crane.md", TEXT.encode()), purpose="user_data")
    folder = own.models.state.files.folder
    for number, odd in enumerate((b"{", b"[]", b"{}")):
        (folder / f"file-{number:032x}.json").write_bytes(odd)
    assert [each.id for each in own.client.files.list()] == [kept.id]
    require_error(own.http.get(f"/v1/files/file-{0:032x}"), 404, "upload it")
    there = sorted(folder.iterdir())

    def full_at_once(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_when_closed(_: Any, file: Any) -> None:
        with open("/dev/full", "wb", buffering=0) as device:
            os.dup2(device.fileno(), file.fileno())
        file.write(b"a little")

    form: Any = {"files": {"file": ("crane.md", TEXT)}}
    for full in (full_at_once, full_when_closed):
        monkeypatch.setattr(files.shutil, "copyfileobj", full)
        answer = own.http.post("/v1/files", **form)
        error = require_error(answer, 507, "make room on the server's disk")
        assert error["code"] == "storage_limit"
        assert sorted(folder.iterdir()) == there


def about(name: str) -> str:
    return question_about([Document(name, TEXT, ())], "How?")


def test_an_upload_is_asked_about_by_its_id_and_read_once(own: Server, tmp_path: Path) -> None:
    client, model = own.client, own.model.names[0]
    made = client.files.create(file=("../../crane.md", TEXT.encode()), purpose="user_data")
    assert (made.filename, made.bytes, made.status) == ("crane.md", len(TEXT), "processed")
    assert client.files.retrieve(made.id).filename == "crane.md"
    assert [each.id for each in client.files.list().data] == [made.id]
    assert client.files.content(made.id).text == TEXT
    part = {"type": "file", "file": {"file_id": made.id}}
    question = {"type": "text", "text": "How?"}
    messages: Any = [{"role": "user", "content": [part, question]}]
    first = client.chat.completions.create(model=model, messages=messages)
    plain = client.chat.completions.create(model=model, messages=said(about("crane.md")))
    assert first.choices[0].message == plain.choices[0].message
    named = client.chat.completions.create(
        model=model, messages=said("How?"), extra_body={"kvlite": {"documents": [made.id]}}
    )
    assert named.choices == first.choices
    items: Any = [
        {
            "role": "user",
            "content": [
                {"type": "input_file", "file_id": made.id},
                {"type": "input_text", "text": "How?"},
            ],
        }
    ]
    response = client.responses.create(model=model, input=items)
    assert response.output_text == first.choices[0].message.content
    for again in (plain, named, response):
        assert again.usage is not None
        assert again.usage.model_dump()["kvlite"]["prompt_tokens"] < 90
    assert {each.name for each in (tmp_path / "data" / "server" / "files").iterdir()} == {
        f"{made.id}.json"
    }
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError, match="no document"):
        client.chat.completions.create(model=model, messages=messages)


def test_a_document_of_the_library_is_there_by_its_name(own: Server) -> None:
    runner = own.model.ready()
    talk = runner.conversation()
    talk.documents = (Document("crane.txt", TEXT, ()),)
    assert talk.read_ahead(all_of(talk.documents))
    path = add_document(Library(), talk, "crane").path
    before = path.read_bytes()
    body = {"messages": said("How?"), "kvlite": {"documents": ["crane"]}}
    made = [own.http.post(CHAT, json=body).json() for _ in range(2)]
    plain = own.http.post(CHAT, json={"messages": said(about("crane.txt"))}).json()
    assert made[0]["choices"] == made[1]["choices"] == plain["choices"]
    assert made[0]["usage"]["prompt_tokens"] > 250
    assert all(each["usage"]["kvlite"]["prompt_tokens"] < 90 for each in made)
    own.end()
    own.until_ended(20)
    assert path.read_bytes() == before


def test_what_is_no_document_is_refused_and_no_path_is_opened(
    own: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    for name in (str(tmp_path / "secret.txt"), "../secret", "/etc/passwd", "", "file-1", "no"):
        body: dict[str, Any] = {"messages": said("How?"), "kvlite": {"documents": [name]}}
        require_error(own.http.post(CHAT, json=body), 404, "there is no document")
        path = f"/v1/files/{name.replace('/', '%2F') or '%20'}"
        require_error(own.http.get(path), 404, "")
        require_error(own.http.delete(path), 404, "")
    for documents, words in ((5, "no list"), ([5], "no list"), (["a"] * 17, "16 at most")):
        body = {"messages": said("How?"), "kvlite": {"documents": documents}}
        require_error(own.http.post(CHAT, json=body), 400, words)

    def send(name: str, content: bytes) -> Any:
        return own.http.post("/v1/files", files={"file": (name, io.BytesIO(content))})

    told = require_error(send("a.png", b"\x89PNG"), 400, "OCR")["message"]
    assert told.startswith("a.png ") and str(tmp_path) not in told
    require_error(send("a.pdf", b"%PDF-1.4 nothing"), 400, "a.pdf")
    require_error(send("a.txt", b""), 400, "a.txt")
    told = require_error(send("a.txt", b"x" * 9_000_000), 400, "could fit")["message"]
    assert told.startswith("a.txt ") and str(tmp_path) not in told
    require_error(own.http.post("/v1/files", json={}), 400, "multipart/form-data")
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    require_error(own.http.post("/v1/files", content=b"junk", headers=form), 400, "no form")
    require_error(own.http.post("/v1/files", files={"other": b"a"}), 400, "no file in its field")
    monkeypatch.setattr(files, "FILE_LIMIT", 1000)
    require_error(send("a.txt", b"x" * 2000), 413, "1,000 bytes")
    monkeypatch.setattr(files, "MOST", 0)
    require_error(send("a.txt", b"x"), 400, "no room")
    assert not [*(tmp_path / "data" / "server" / "files").glob("*")]
