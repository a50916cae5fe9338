"""What came by HTTP and what was answered, in a folder: a wrong answer is looked up there."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvlite.server.routes import make_app


@dataclass
class Recording:
    """Requests of one agent, one file each.

    Attributes:
        refused: those that were answered with an error, a line each.
    """

    folder: Path
    count: int = 0
    refused: list[str] = field(default_factory=list)

    def begin(self, folder: Path) -> None:
        """Another agent comes."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.txt"):
            old.unlink()
        self.folder, self.count, self.refused = folder, 0, []


class Recorded:
    """An app, and what passes by."""

    def __init__(self, app: Any, recording: Recording) -> None:
        self.app, self.recording = app, recording

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record, status, began = self.recording, 0, time.monotonic()
        record.count += 1
        file, came, went = record.folder / f"{record.count:02}.txt", bytearray(), bytearray()

        async def hear() -> Any:
            message = await receive()
            came.extend(message.get("body", b""))
            return message

        async def tell(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            went.extend(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, hear, tell)
        finally:
            line = f"{scope['method']} {scope['path']}: {status}"
            headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
            seconds = f"{time.monotonic() - began:.1f} s"
            parts = [line, seconds, json.dumps(headers), came.decode(errors="replace")]
            file.write_text("\n".join([*parts, "", went.decode(errors="replace")]))
            # What isn't there is asked for by some, and they go on without.
            if status >= 400 and scope["method"] == "POST":
                record.refused.append(f"{line} {went.decode(errors='replace')[:300]} ({file})")


@contextmanager
def recording(folder: Path) -> Iterator[Recording]:
    """Record what servers are asked that begin meanwhile."""
    made = Recording(folder)
    with patch("kvlite.server.serve.make_app", lambda models: Recorded(make_app(models), made)):
        yield made
