"""Uploads: where they are, whose, how many, and for how long."""

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.middleware import Middleware

from kvlite.errors import DocumentError
from kvlite_app.engine import uploads as places
from kvlite_app.engine.uploads import Uploads
from kvlite_app.web import uploading
from kvlite_app.web.guard import ServerConfig
from kvlite_app.web.uploading import Uploading
from tests.app.small_app import SmallApp, logged_in

UPLOAD = "/gradio_api/upload"


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    return Uploads(tmp_path / "uploads")


@pytest.fixture
def app(uploads: Uploads) -> SmallApp:
    guards = ServerConfig("0.0.0.0", auth=[("ann", "a")]).middleware()
    return SmallApp([*guards, Middleware(Uploading, uploads=uploads)])


def sent(web: Any, *files: tuple[str, bytes]) -> Any:
    return web.post(UPLOAD, files=[("files", each) for each in files])


def left(uploads: Uploads) -> list[Path]:
    """Files, and folders with none in them."""
    return [each for each in uploads.folder.glob("*/*") if each.exists()]


def test_the_same_file_of_two_users_lies_where_neither_can_know(
    app: SmallApp, uploads: Uploads
) -> None:
    ann, ben = logged_in(app, "ann"), logged_in(app, "ben")
    ((hers,), (his,)) = (sent(each, ("a.txt", b"Hello")).json() for each in (ann, ben))
    assert Path(hers).read_bytes() == Path(his).read_bytes() == b"Hello"
    assert hers != his
    assert len({Path(each).parent.name for each in sent(ann, *2 * [("a.txt", b"")]).json()}) == 2
    assert uploads.own("ann", hers) == hers
    for path in (his, hers, f"{Path(his).parent}/../{Path(his).parent.name}/a.txt", None, 7, "\0"):
        with pytest.raises(DocumentError, match="no file that was uploaded"):
            uploads.own("eve", path)
    with pytest.raises(DocumentError):
        uploads.own("ben", hers)
    with pytest.raises(DocumentError):
        uploads.own("ben", str(Path(his).parent))


@pytest.mark.parametrize(
    "name", ["../../../etc/cron.d/a", "..", ".", "a/b/c.txt", "\x1b[2J.txt", "é" * 400, ".hidden"]
)
def test_a_name_leads_nowhere_else(app: SmallApp, uploads: Uploads, name: str) -> None:
    (path,) = sent(logged_in(app, "ann"), (name, b"Hello")).json()
    assert uploads.own("ann", path) == path
    assert Path(path).parent.parent.parent == uploads.folder
    assert re.fullmatch(r"[^\x00-\x1f/]{1,200}", Path(path).name)
    assert not Path(path).name.startswith(".")


def test_all_files_together_have_a_limit_and_so_has_each_user(
    app: SmallApp, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "LEAST", 1)
    monkeypatch.setattr(places, "MOST_EACH", 60_000)
    monkeypatch.setattr(places, "MOST", 100_000)
    monkeypatch.setattr(uploading, "_LOOK", 1)
    ann, ben, eve = (logged_in(app, each) for each in ("ann", "ben", "eve"))
    (path,) = sent(ann, ("a.txt", b"a" * 50_000)).json()
    refused = sent(ann, ("a.txt", b"a" * 50_000_000))
    assert (refused.status_code, "no room for more documents" in refused.text) == (507, True)
    assert sent(ben, ("a.txt", b"a" * 45_000)).status_code == 200  # his room is there still
    assert sent(eve, ("a.txt", b"a" * 6_000)).status_code == 507
    assert len(left(uploads)) == 2  # of what was refused nothing
    uploads.remove([path])
    assert sent(eve, ("a.txt", b"a" * 500)).status_code == 200


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"Hello", "text/plain"),
        (b"Hello", "multipart/form-data"),
        (b"Hello", "multipart/form-data; boundary="),
        (b"Hello", "multipart/form-data; boundary=x"),
        (b"--x\r\n\r\nHello\r\n--x--\r\n", "multipart/form-data; boundary=x"),
        (b"--x\r\n" + b"a" * 100_000, "multipart/form-data; boundary=x"),
        (
            b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nHello\r\n--x--\r\n',
            "multipart/form-data; boundary=x",
        ),
        (b"--x--", "multipart/form-data; boundary=x; charset=nope"),
    ],
)
@pytest.mark.parametrize("query", ["", "?upload_id=abc"])
def test_what_is_no_upload_is_refused_in_a_sentence(
    app: SmallApp, uploads: Uploads, body: bytes, kind: str, query: str
) -> None:
    web = logged_in(app, "ann")
    answer = web.post(UPLOAD + query, content=body, headers={"content-type": kind})
    assert answer.status_code in (400, 413) or answer.json() == []
    assert left(uploads) == []


def test_what_was_cut_off_leaves_nothing(app: SmallApp, uploads: Uploads) -> None:
    def cut() -> Any:
        yield b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n'
        yield b"Hello" * 1000

    web = logged_in(app, "ann")
    kind = {"content-type": "multipart/form-data; boundary=x"}
    web.post(UPLOAD, content=cut(), headers=kind)
    assert left(uploads) == []


def test_what_nobody_sends_goes_after_an_hour(uploads: Uploads) -> None:
    (old := uploads.new("ann") / "old.txt").write_bytes(b"a")
    (new := uploads.new("ann") / "new.txt").write_bytes(b"a")
    past = time.time() - 2 * places.KEPT
    os.utime(old, (past, past))
    os.utime(old.parent, (past, past))
    uploads.new("ben")
    assert (old.exists(), new.exists()) == (False, True)


def test_nothing_outside_is_removed(uploads: Uploads, tmp_path: Path) -> None:
    (mine := tmp_path / "mine.txt").write_bytes(b"a")
    uploads.remove([str(mine), str(tmp_path / "none.txt")])
    assert mine.exists()
    uploads.clear()
    uploads.clear()
    assert not uploads.folder.exists()
