"""A hub on this machine, which huggingface_hub downloads from."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """A hub with one repository, `a/b`, which may fall silent."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.files = files
        self.silent = threading.Event()
        self.asked = threading.Event()
        self.over = threading.Event()


class Answering(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked.set()
        if self.server.silent.is_set():
            self.server.over.wait(60)
            return
        path = self.path.partition("?")[0]
        name, files = path.rpartition("/")[2], self.server.files
        if path.startswith("/api/"):
            siblings = [{"rfilename": each} for each in files]
            about: Any = {"id": "a/b", "sha": "1" * 40, "siblings": siblings}
            if "/tree/" in path:
                about = [self.entry(each) for each in files]
            self.answer(json.dumps(about).encode(), "application/json")
        elif name in files:
            self.answer(files[name], "application/octet-stream")
        else:
            self.send_error(404)

    def entry(self, name: str) -> dict[str, Any]:
        content = self.server.files[name]
        digest, size = hashlib.sha256(content).hexdigest(), len(content)
        large = {"oid": digest, "size": size, "pointerSize": 100}
        return {"type": "file", "path": name, "size": size, "oid": "2" * 40, "lfs": large}

    def answer(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", "1" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass
