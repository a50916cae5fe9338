"""llama.cpp on the same GGUF file, as a peer: a llama-server that is there, or the one in the
package xllamacpp. It reads and answers the same tokens, and says itself how long that took."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

import torch

from kvlite.config.checked_file import from_json
from kvlite.errors import ModelError, SettingError

PROGRAM, PACKAGE = "llama-server", "xllamacpp"
# Seconds for a model to load, and for one answer.
LOADING, ANSWERING = 120.0, 1800.0
_LOCAL = build_opener(ProxyHandler({}))


def require_llama_cpp() -> None:
    """Raises SettingError if there is no llama.cpp on this machine."""
    if shutil.which(PROGRAM) is None and find_spec(PACKAGE) is None:
        raise SettingError(
            f"--peer llama.cpp needs {PROGRAM} on the path, or pip install {PACKAGE}"
        )


class LlamaCpp:
    """A server that runs."""

    def __init__(self, address: str) -> None:
        self.address = address

    def times(self, ids: Sequence[int], new_tokens: int) -> tuple[float, float]:
        """Seconds that it takes to read a prompt, and for one further token, of `new_tokens`."""
        asked = {
            "prompt": [*ids],
            "n_predict": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        sent = Request(
            f"{self.address}/completion",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with _LOCAL.open(sent, timeout=ANSWERING) as answer:
            found = from_json(answer.read())["timings"]
        if found["prompt_n"] != len(ids):
            raise ModelError(f"llama.cpp read {found['prompt_n']} tokens of {len(ids)}")
        return found["prompt_ms"] / 1e3, found["predicted_per_token_ms"] / 1e3


@contextmanager
def llama_cpp(file: Path, context: int) -> Iterator[LlamaCpp]:
    """A server on a GGUF file, with as many threads as torch has, for prompts and answers of
    `context` tokens together.

    Raises:
        ModelError: it does not load the file.
    """
    program, threads, port = shutil.which(PROGRAM), torch.get_num_threads(), _free_port()
    if program is None:
        server = _in_this_process(file, context, threads, port)
        yield LlamaCpp(server.listening_address)
        del server  # which ends it
        return
    given = {"-m": file, "-c": context, "-t": threads, "-np": 1, "--port": port}
    command = [program, *(str(word) for pair in given.items() for word in pair)]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_for(address, running, file)
        yield LlamaCpp(address)
    finally:
        running.terminate()
        running.wait()


def _in_this_process(file: Path, context: int, threads: int, port: int) -> Any:
    """The package's server, which runs as long as it is referred to."""
    import xllamacpp

    wanted = xllamacpp.CommonParams()
    wanted.model.path = str(file)
    wanted.n_ctx, wanted.n_parallel, wanted.port = context, 1, port
    wanted.cpuparams.n_threads = wanted.cpuparams_batch.n_threads = threads
    wanted.verbosity = -1
    try:
        return xllamacpp.Server(wanted)
    except RuntimeError as error:
        raise ModelError(f"llama.cpp does not load {file}: {error}") from None


def _free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


def _wait_for(address: str, running: "subprocess.Popen[bytes]", file: Path) -> None:
    end = time.monotonic() + LOADING
    while running.poll() is None and time.monotonic() < end:
        try:
            with _LOCAL.open(f"{address}/health", timeout=5):
                return
        except (URLError, TimeoutError):
            time.sleep(0.2)
    raise ModelError(f"llama.cpp does not load {file}: see what {PROGRAM} -m {file} says")
