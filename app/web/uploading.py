"""Takes files that are uploaded."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import parse_qs

from gradio.route_utils import GradioMultiPartParser, GradioUploadFile
from gradio.routes import file_upload_statuses
from gradio_client.utils import strip_invalid_filename_characters  # type: ignore[import-untyped]
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvlite.web.sending import parts_of

from ..engine.uploads import Uploads
from .bodies import is_upload
from .routes import user_of

# Bytes a document may have, and files that come at once.
LARGEST, _AT_ONCE = 200 << 20, 100
# Bytes after which it is looked again whether there is room: others upload too.
_LOOK = 8 << 20


class UploadsFull(Exception):
    """All files that were uploaded would be larger together than they may."""


class Uploading:
    """Takes uploads in gradio's place, which keeps each where its contents say, for all users."""

    def __init__(self, app: ASGIApp, uploads: Uploads) -> None:
        self.app = app
        self.uploads = uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take files, and answer where they are; or answer as the app does."""
        if scope["type"] != "http" or not is_upload(scope):
            await self.app(scope, receive, send)
            return
        if (answer := await self._answer(scope, receive)) is not None:
            await answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Response | None:
        """What to answer; None if nobody is there any more."""
        headers, owner = Headers(scope=scope), user_of(scope) or ""
        if not headers.get("content-type", "").lower().startswith("multipart/form-data"):
            return PlainTextResponse("Send files as multipart/form-data.", 400)
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        upload_id = query.get("upload_id", [None])[-1]
        incoming = self.uploads.new(owner)
        try:
            parts = self._counted(scope, receive, owner)
            files = await _come(headers, parts, incoming, upload_id)
            await self._require_room(owner)
            return JSONResponse([self._kept(each, owner) for each in files])
        except ClientDisconnect:
            return None
        except UploadsFull:
            told = "There is no room for more documents now: send those that wait, or come back"
            return PlainTextResponse(f"{told} in an hour.", 507)
        except MultiPartException as error:
            return PlainTextResponse(
                error.message, 413 if "maximum allowed size" in error.message else 400
            )
        except (ValueError, LookupError):
            return PlainTextResponse("This is no file as browsers send them.", 400)
        except OSError as error:
            return PlainTextResponse(f"The file cannot be written: {error.strerror or error}.", 507)
        finally:
            if upload_id is not None:
                file_upload_statuses.set_done(upload_id)
            shutil.rmtree(incoming, ignore_errors=True)

    async def _counted(self, scope: Scope, receive: Receive, owner: str) -> AsyncIterator[bytes]:
        """What is sent, for as long as there is room."""
        come = _LOOK
        async for part in parts_of(scope, receive):
            come += len(part)
            if come >= _LOOK:
                come = 0
                await self._require_room(owner)
            yield part

    async def _require_room(self, owner: str) -> None:
        if await asyncio.to_thread(self.uploads.room, owner) <= 0:
            raise UploadsFull

    def _kept(self, file: GradioUploadFile, owner: str) -> str:
        named = strip_invalid_filename_characters(Path(file.filename or "").name)
        path = self.uploads.new(owner) / ("file" if named.startswith(".") else named or "file")
        file.file.close()
        os.replace(str(file.file.name), path)
        return str(path)


async def _come(
    headers: Headers, parts: AsyncIterator[bytes], incoming: Path, upload_id: str | None
) -> list[GradioUploadFile]:
    parser = GradioMultiPartParser(
        headers,
        parts,  # type: ignore[arg-type]
        max_files=_AT_ONCE,
        max_fields=0,
        upload_dir=incoming,
        upload_id=upload_id,
        upload_progress=file_upload_statuses if upload_id else None,
        max_file_size=LARGEST,
    )
    form = await parser.parse()
    return [each for _, each in form.multi_items() if isinstance(each, GradioUploadFile)]
