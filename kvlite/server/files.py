"""`/v1/files`: documents that programs upload, and name by their id; those of the library by name.

What is kept is a document's text, in a file named after its id. No name that is sent becomes a
path.
"""

import asyncio
import json
import logging
import os
import re
import shutil
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from kvlite.config.atomic_file import part_name, replaced, sweep
from kvlite.config.checked_file import Damaged, PassedOver, from_json, of_type, sound
from kvlite.conversation.convert import open_library
from kvlite.conversation.entries import entries, entry_named
from kvlite.conversation.snapshot import Snapshot
from kvlite.documents import Document, read_document
from kvlite.documents.opening import FILE_LIMIT
from kvlite.errors import ContextError, DocumentError, SettingError, SnapshotError
from kvlite.model.chat_template import question_about
from kvlite.server.messages import Plain
from kvlite.server.refusals import Refusal
from kvlite.web.sending import parts_of

_LOG = logging.getLogger("kvlite.server")
# Files that are kept, and bytes of the text of all.
MOST, ROOM = 1000, 1 << 30
_ID, _SUFFIX = re.compile(r"file-[0-9a-f]{32}"), re.compile(r"\.[A-Za-z0-9]{1,8}")
_DOCUMENTS = 16
# Files that may be coming at once.
_AT_ONCE = 16
# What OpenAI's API calls files that messages name.
_PURPOSES = "user_data", "assistants"


class Files:
    """Uploaded documents, in a folder that their owner alone can read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._passed_over = PassedOver(_LOG)
        self._coming, self._reading = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(2)
        with suppress(OSError):
            sweep(folder)

    async def add(self, request: Request, limit: int, **reading: Any) -> dict[str, Any]:
        """Keep the document that a request sends; at most `limit` characters could fit the model.
        `reading` are of `read_document`. Raises Refusal if it is too large, no form with a file, or
        there is no room, and DocumentError or ContextError if it cannot be read as a document, or
        is too long."""
        if request.headers.get("content-length", "").isdigit():
            _require_small(int(request.headers["content-length"]))
        kept = list[int]()
        for path in self._paths():
            with suppress(FileNotFoundError):  # it was deleted meanwhile
                kept.append(path.stat().st_size)
        if len(kept) >= MOST or sum(kept) >= ROOM:
            said = f"the {len(kept)} files here leave no room"
            raise Refusal(
                f"{said}: delete one (DELETE /v1/files/ID)", param="file", code="storage_limit"
            )
        with _room():
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        async with self._coming:  # which may take long, and holds up no reading
            with _room():
                upload, purpose = await _uploaded(request)
        try:
            async with self._reading:
                return await asyncio.to_thread(self._kept, upload, purpose, limit, **reading)
        finally:
            await upload.close()

    def _kept(self, upload: UploadFile, purpose: str, limit: int, **reading: Any) -> dict[str, Any]:
        name = os.path.basename((upload.filename or "").replace("\\", "/"))[:200] or "file"
        suffix = os.path.splitext(name)[1]
        suffix = suffix if _SUFFIX.fullmatch(suffix) else ""
        path = self.folder / part_name("upload", suffix)
        try:
            with _room(), path.open("xb") as file:
                shutil.copyfileobj(upload.file, file)
                size = file.tell()
            document = read_document(str(path), limit=limit, **reading)
        except (ContextError, DocumentError) as error:
            raise type(error)(str(error).replace(str(path), name)) from None
        finally:
            with suppress(OSError):  # the disk is read-only
                path.unlink()
        about = {
            "id": f"file-{uuid4().hex}",
            "object": "file",
            "bytes": size,
            "created_at": int(time.time()),
            "filename": name,
            "purpose": purpose,
            "status": "processed",
        }
        plain = {"about": about, "document": asdict(document) | {"name": name}}
        with _room(), replaced(self.folder / f"{about['id']}.json") as out:
            out.write(json.dumps(plain).encode("utf-8", "replace"))
        return about

    def all(self) -> list[dict[str, Any]]:
        """What there is, the newest first."""
        found = list[dict[str, Any]]()
        for path in self._paths():
            with suppress(Refusal):  # it is damaged, or was deleted meanwhile
                found.append(self._read(path)[0])
        return sorted(found, key=lambda each: -each["created_at"])

    def about(self, file_id: str) -> dict[str, Any]:
        """One of them. Raises Refusal if it is not there."""
        return self._read(self._path(file_id))[0]

    def remove(self, file_id: str) -> dict[str, Any]:
        """Forget one of them. Raises Refusal if it is not there."""
        self._path(file_id).unlink(missing_ok=True)
        return {"id": file_id, "object": "file", "deleted": True}

    def document(self, file_id: str) -> Document:
        """What was uploaded. Raises Refusal if it is not there."""
        return self._read(self._path(file_id))[1]

    def _paths(self) -> list[Path]:
        return [*self.folder.glob("file-*.json")]

    def _path(self, file_id: str) -> Path:
        path = self.folder / f"{file_id}.json"
        if not _ID.fullmatch(file_id) or not path.is_file():
            raise _none(file_id)
        return path

    def _read(self, path: Path) -> tuple[dict[str, Any], Document]:
        try:
            plain = from_json(path.read_bytes())
            with sound():
                of_type(int, plain["about"]["created_at"])
                return dict(plain["about"]), Document.from_plain(plain["document"])
        except Damaged as error:
            self._passed_over(path, error)
            raise _none(path.stem) from None
        except OSError:
            raise _none(path.stem) from None


def with_documents(
    messages: Sequence[Plain], names: Sequence[str], files: Files
) -> tuple[list[Plain], list[Path]]:
    """Messages with the documents that they name, and files of the library that have read them.
    Raises Refusal if one is not there, or there are too many.

    Args:
        messages: each may have ids of `documents`, which it is about.
        names: ids, or names in the library, of what the first message of the user is about.
    """
    made, paths, first = list[Plain](), list[Path](), True
    for each in messages:
        wanted = list(each.get("documents", ()))
        if each["role"] == "user" and first:
            wanted, first = [*names, *wanted], False
        if len(wanted) > _DOCUMENTS:
            said = f"there are {len(wanted)} documents: {_DOCUMENTS} at most"
            raise Refusal(said, param="kvlite" if names else "messages")
        found = [_found(name, files, paths) for name in wanted]
        documents = [document for several in found for document in several]
        content = question_about(documents, each["content"]) if documents else each["content"]
        plain = {key: value for key, value in each.items() if key != "documents"}
        made.append({**plain, "content": content})
    return made, paths


def _found(name: str, files: Files, paths: list[Path]) -> Sequence[Document]:
    """The documents of a name; the path is added if it is the library's, where conversations may
    have the name, too."""
    if name.startswith("file-"):
        return [files.document(name)]
    try:
        library = open_library()
        read = (each for each in entries(library) if not each.is_conversation)
        entry = next((each for each in read if each.name == name), None)
        entry = entry or entry_named(library, name)
        if entry.about is None:
            raise SnapshotError(entry.flaw or "a server answers it")
        path = entry.about.path
        with Snapshot(path) as saved:
            documents = saved.documents()
    except SettingError:
        raise _none(name) from None
    except SnapshotError as error:
        said = f"{name[:100]!r} of the library cannot be opened: {error}"
        raise Refusal(said, param="kvlite") from None
    if not documents:
        said = f"{name[:100]!r} of the library is a conversation without a document"
        raise Refusal(said, param="kvlite")
    paths.append(path)
    return documents


@contextmanager
def _room() -> Iterator[None]:
    """What is uploaded is written within; raises Refusal if it cannot be."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        said = f"the file cannot be kept ({why}): make room on the server's disk"
        raise Refusal(said, 507, code="storage_limit") from None


def _none(name: str) -> Refusal:
    said = f"there is no document {name[:100]!r} here: upload it (/v1/files), or `kvlite read` it"
    return Refusal(said, 404, code="not_found")


def _require_small(size: int) -> None:
    if size > FILE_LIMIT:
        raise Refusal(f"a file has at most {FILE_LIMIT:,} bytes", 413, "file")


async def _uploaded(request: Request) -> tuple[UploadFile, str]:
    """The file that comes, and what it is for."""
    headers = Headers(scope=request.scope)
    if not headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise Refusal("send a file as multipart/form-data, in the field file", param="file")

    async def counted() -> AsyncGenerator[bytes]:
        size = 0
        async for part in parts_of(request.scope, request.receive):
            size += len(part)
            _require_small(size)
            yield part
        yield b""

    try:
        parser = MultiPartParser(headers, counted(), max_files=1, max_fields=20)
        form = await parser.parse()
    except (MultiPartException, ValueError, LookupError) as error:
        raise Refusal(f"this is no form with one file: {error}", param="file") from None
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise Refusal("the form has no file in its field file", param="file")
    purpose = form.get("purpose") or _PURPOSES[0]
    if purpose not in _PURPOSES:
        said = f"purpose {str(purpose)[:40]!r} is not supported: send {' or '.join(_PURPOSES)}"
        raise Refusal(said, param="purpose")
    return upload, str(purpose)
