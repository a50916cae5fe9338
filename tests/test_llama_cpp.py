"""llama.cpp as a peer of `kvlite bench speed`, from a stand-in for its server."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvlite.bench import llama_cpp as peer
from kvlite.errors import ModelError, SettingError

# Answers as llama-server does: it takes what it is given for its options, and tells its times.
SERVER = f"""#!{sys.executable}
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["ignore_eos"] and not asked["cache_prompt"]
        count = len(asked["prompt"]) - (sys.argv[sys.argv.index("-m") + 1].endswith("less.gguf"))
        times = {{"prompt_n": count, "prompt_ms": 10.0 * count, "predicted_per_token_ms": 25.0}}
        self.answer({{"timings": times}})
    def answer(self, made):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(made).encode())
    def log_message(self, *_):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
if sys.argv[sys.argv.index("-m") + 1].endswith("broken.gguf"):
    sys.exit(1)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "llama-server"
    path.write_text(SERVER)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    yield path


def test_its_own_times_are_taken_and_it_ends() -> None:
    with peer.llama_cpp(Path("a.gguf"), 64) as server:
        assert server.times([1, 2, 3], 8) == (0.03, 0.025)
    with pytest.raises(OSError):
        server.times([1], 8)
    with peer.llama_cpp(Path("less.gguf"), 64) as server, pytest.raises(ModelError, match="2 tok"):
        server.times([1, 2, 3], 8)  # a prompt that it reads otherwise
    broken = peer.llama_cpp(Path("broken.gguf"), 64)
    with pytest.raises(ModelError, match=r"does not load broken\.gguf"), broken:
        pass


def test_the_package_serves_where_there_is_no_program(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.unlink()
    made: list[Any] = []

    def params() -> SimpleNamespace:
        return SimpleNamespace(
            model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace()
        )

    def serve(wanted: Any) -> SimpleNamespace:
        made.append(wanted)
        return SimpleNamespace(listening_address="http://127.0.0.1:1")

    package = SimpleNamespace(CommonParams=params, Server=serve)
    monkeypatch.setitem(sys.modules, "xllamacpp", package)
    with peer.llama_cpp(Path("a.gguf"), 64) as server:
        assert server.address == "http://127.0.0.1:1"
    (wanted,) = made
    assert (wanted.model.path, wanted.n_ctx, wanted.n_parallel) == ("a.gguf", 64, 1)


def test_where_there_is_none_it_says_how_to_get_one(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.require_llama_cpp()
    program.unlink()
    monkeypatch.setattr(peer, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match="pip install xllamacpp"):
        peer.require_llama_cpp()
