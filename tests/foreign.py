"""A server that is not kvlite's, and knows little of OpenAI's API."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HELD = "hold on"


class Foreign(ThreadingHTTPServer):
    """A server that says how many messages it was sent and the last word, and nothing else.

    Attributes:
        asked: bodies of requests.
        deltas: what it says instead, if anything.
        left: set once the client that said "hold on", and got no answer, has gone.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = list[dict[str, Any]]()
        self.deltas = list[dict[str, Any]]()
        self.left = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Foreign

    def do_GET(self) -> None:
        self._begin()
        self.wfile.write(b'{"data": [{"id": "odd/one"}, {"id": "two"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        if "seed" in body:
            self._begin()
            self._say({"error": {"message": "no seeds here"}})
            return
        said = body["messages"][-1]["content"]
        if said == HELD:
            self._until_left()
            return
        self._begin()
        last = said.replace("\n", " ").split(" ")[-1]
        for text in (f"{body['model']} heard ", f"{len(body['messages'])}: {last}"):
            if not self.server.deltas:
                self._say({"choices": [{"delta": {"content": text}}]})
        for delta in self.server.deltas:
            self._say({"choices": [{"delta": delta}]})
        self._say({"choices": [{"delta": {}, "finish_reason": "length"}]})

    def _begin(self) -> None:
        self.send_response(200)
        self.end_headers()

    def _say(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(f"data:{json.dumps(chunk, ensure_ascii=False)}\r\n\r\n".encode())

    def _until_left(self) -> None:
        """Say nothing at all, not even that it is well."""
        if not self.connection.recv(1):
            self.server.left.set()

    def log_message(self, *args: Any) -> None: ...
