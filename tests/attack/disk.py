"""A server whose disk fails and comes back, and one that is killed."""

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from tests.attack.process import ATTACKED, Served, chat, said_in, served, until
from tests.server.conftest import said

# Each has more tokens than what is called short, so that it is stored.
LONG = {bird: said(f"{bird} stand in the water. " * 250) for bird in ("Herons", "Storks")}
_SIZE = 24 << 20


def disk(model: Path, folder: Path) -> list[str]:
    """What is wrong while the data folder is full, read-only or has dangling links, and after."""
    found = list[str]()
    with _small_disk(folder / "small") as data:
        if data is None:
            print("the disk: skipped, as only root may mount one")
            return []
        with served(model, data, *ATTACKED) as server, server.http as http:
            texts = {bird: said_in(chat(http, each)) for bird, each in LONG.items()}
            found += _disk_fails(server, http, data, texts)
            found += server.flaws()
    print(
        f"the disk: {'; '.join(found) or 'full, read-only and with dangling links: all answered'}"
    )
    return found


def _disk_fails(
    server: Served, http: httpx.Client, data: Path, texts: dict[str, str]
) -> Iterator[str]:
    turns = {bird: [*LONG[bird]] for bird in LONG}

    def go_on(when: str) -> Iterator[str]:
        for bird, messages in turns.items():
            messages += said("", texts[bird])[1:] + said(f"And {when}?")
            answer = chat(http, messages)
            if answer.status_code != 200:
                yield f"{bird}, {when}: {answer.status_code} {answer.text[:200]}"
                return
            texts[bird] = said_in(answer)
        upload = http.post("/v1/files", files={"file": (f"{when}.txt", b"Rails are shy.")})
        if upload.status_code not in (200, 400, 507):
            yield f"a file, {when}: {upload.status_code} {upload.text[:200]}"

    until(lambda: bool([*server.folder.rglob("*.kv")]), 30)
    yield from go_on("before")
    ballast = data / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    for _ in range(3):
        yield from go_on("full")
    ballast.unlink()
    yield from go_on("with room again")
    if _mount("-o", "remount,ro", str(data)):
        yield "it could not be made read-only"
    for _ in range(3):
        yield from go_on("read-only")
    _mount("-o", "remount,rw", str(data))
    yield from go_on("writable again")
    for parent in [server.data / "server", *(server.data / "server").rglob("*/")]:
        (parent / "9.kv").symlink_to(data / "nowhere")
        (parent / "0123.json").symlink_to(data / "nowhere")
        (parent / "ab").symlink_to(parent)
    for _ in range(2):
        yield from go_on("with dangling links")


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path | None]:
    folder.mkdir()
    is_there = os.geteuid() == 0 and not _mount("-t", "tmpfs", "-o", f"size={_SIZE}", "x", folder)
    try:
        yield folder if is_there else None
    finally:
        if is_there:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def _mount(*args: str | Path) -> int:
    made = subprocess.run(["mount", *map(str, args)], check=False, capture_output=True)
    return made.returncode


def kill(model: Path, folder: Path, times: int = 2) -> list[str]:
    """What is wrong after a server was killed amid requests, and started again."""
    found, data = list[str](), folder / "killed"
    second, port = dict[str, list[dict[str, str]]](), 0
    for number in range(times):
        with served(model, data, *ATTACKED, port=port) as server, server.http as http:
            port = server.port
            for bird, messages in LONG.items():
                answer = chat(http, second.get(bird, messages))
                used = answer.json()["usage"]["kvlite"]["prompt_tokens"]
                if bird in second and used > 100:
                    found.append(f"{bird} was read again after a kill: {used} tokens")
                text = said_in(answer)
                second[bird] = [*second.get(bird, messages), *said("", text)[1:], *said("And?")]
            if not until(lambda: len([*server.folder.rglob("*.kv")]) >= len(LONG), 60):
                found.append("what was finished is not stored after a minute")
            going = [threading.Thread(target=_keep_asking, args=(server,)) for _ in range(4)]
            for each in going:
                each.start()
            until(lambda: False, 1 + number)
            server.kill()
            for each in going:
                each.join(20)
                if each.is_alive():
                    found.append("a client still waits for a server that was killed")
            found += server.flaws()
    with served(model, data, *ATTACKED, port=port) as server, server.http as http:
        for bird, messages in second.items():
            used = chat(http, messages).json()["usage"]["kvlite"]["prompt_tokens"]
            if used > 100:
                found.append(f"{bird} was read again after a kill: {used} tokens")
        found += server.flaws()
    print(f"killed {times} times: {'; '.join(found) or 'what was finished was there each time'}")
    return found


def _keep_asking(server: Served) -> None:
    with suppress(httpx.TransportError), server.http as http:
        while True:
            body = {"messages": said("Go on."), "max_tokens": 200, "stream": True}
            with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                for _ in answer.iter_lines():
                    pass
