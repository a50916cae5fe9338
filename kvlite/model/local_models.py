"""Models on this machine: in Hugging Face's cache, a models folder, LM Studio's and Ollama's."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event

from kvlite.config.checked_file import Damaged, from_json, sound
from kvlite.config.paths import cache_folder, models_folder
from kvlite.config.settings import EMBEDDED_MODEL
from kvlite.errors import ModelError, require_uncancelled
from kvlite.model.embedded import embedded_folder, embedded_ggufs
from kvlite.model.gguf.config import model_type
from kvlite.model.gguf.folder import files_used, outdated_folders
from kvlite.model.gguf.header import names_model, read_header
from kvlite.model.shape import read_config
from kvlite.model.source import gguf_file, ggufs_within, ollama_models, require_weights

# Folders and files of the cache that versions before 0.2 made.
_CONVERTED = ("models", "configs", "converting.lock")
HUB, FOLDER, LM_STUDIO, OLLAMA = "Hugging Face", "models folder", "LM Studio", "Ollama"
USED = "used before"
# Folders below a user's own that are looked through for a file, and how many at most.
_DEPTH, _FOLDERS = 3, 5_000


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine.

    Attributes:
        name: what `--model` takes.
        place: where it was found: embedded, or one of this module's names.
        path: its folder or GGUF file; for Hugging Face's cache all that it has of the repository.
        nbytes: bytes of its files.
        architecture: the config's name for it, or GGUF's; empty if unknown.
        max_context: tokens it was trained to hold.
        flaw: why it cannot be run; empty if nothing is known to be wrong.
    """

    name: str
    place: str
    path: Path
    nbytes: int
    architecture: str = ""
    max_context: int | None = None
    flaw: str = ""


def models_here() -> list[LocalModel]:
    """All models on this machine: the embedded one, then place by place, by name."""
    found = [_of_gguf(EMBEDDED_MODEL, "embedded", file) for file in embedded_ggufs()]
    found += [*_in_hub_cache(), *_in_folder(models_folder(), FOLDER)]
    for home in (".lmstudio/models", ".cache/lm-studio/models"):
        found += _in_folder(Path.home() / home, LM_STUDIO)
    found += [_of_gguf(name, OLLAMA, blob) for name, blob in ollama_models()]
    known = {each.path.resolve() for each in found}
    used = (file for file in files_used() if file.resolve() not in known)
    return found + [_of_gguf(_short(file), USED, file) for file in used]


def model_at(path: str) -> LocalModel:
    """A GGUF file or a folder of this machine, by its path. Raises ModelError if nothing is
    there."""
    place = Path(path).expanduser().absolute()
    if not path.strip() or not place.exists():
        raise ModelError(f"there is no file or folder {path!r} on this machine")
    file = gguf_file(str(place)) or place
    return (_of_folder if file.is_dir() else _of_gguf)(_short(place), USED, file)


def find_file(name: str, size: int) -> Path | None:
    """A file of that name and size in the folders of models and below the user's own, or None: a
    browser says no more of what is dropped on a page."""
    folders = [(each.path.parent, 0) for each in models_here()]
    folders += [(models_folder(), _DEPTH), (Path.home() / "Downloads", 0), (Path.home(), _DEPTH)]
    looked = set[Path]()
    while folders and len(looked) < _FOLDERS:
        folder, depth = folders.pop(0)
        if folder in looked:
            continue
        looked.add(folder)
        with suppress(OSError):
            if (found := folder / name).is_file() and found.stat().st_size == size:
                return found
            if depth:
                within = (
                    each for each in folder.iterdir() if each.name[0] != "." and each.is_dir()
                )
                folders += [(each, depth - 1) for each in sorted(within)]
    return None


def remove_model(model: LocalModel) -> None:
    """Delete a model's files, if they were fetched, or are in Hugging Face's cache or the models
    folder. Raises ModelError if they belong to another program, or cannot be deleted."""
    if model.place == USED:
        raise ModelError(f"{model.path} is a file of yours: delete it yourself")
    if model.place not in (HUB, FOLDER) and model.path.parent != embedded_folder():
        owner = "pip" if model.name == EMBEDDED_MODEL else model.place
        raise ModelError(f"{model.name} belongs to {owner}: remove it there")
    try:
        if model.path.is_file():
            for part in _parts(model.path):
                part.resolve().unlink()  # a hub's cache has links to what it downloaded
                part.unlink(missing_ok=True)
        else:
            shutil.rmtree(model.path)
    except OSError as error:
        raise ModelError(f"{model.path} cannot be removed ({error.strerror})") from error


def _parts(file: Path) -> tuple[Path, ...]:
    try:
        return read_header(file).paths
    except ModelError:
        return (file,)


def leftovers() -> list[Path]:
    """What earlier versions of kvlite left in the cache: GGUF files, converted to safetensors, and
    what was known of others."""
    converted = (cache_folder() / name for name in _CONVERTED)
    return [*filter(Path.exists, converted), *outdated_folders()]


def bytes_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def sha256(path: Path, progress: Callable[[int, int], object], cancel: Event) -> str:
    """A file's digest; `progress` is called with bytes read and all. Raises ModelError if it cannot
    be read, Stopped if `cancel` was set."""
    digest, done = hashlib.sha256(), 0
    try:
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            while block := file.read(8 << 20):
                require_uncancelled(cancel)
                digest.update(block)
                done += len(block)
                progress(done, size)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def remove_leftovers(paths: list[Path]) -> None:
    """Delete `leftovers`. Raises ModelError if that cannot be done."""
    for path in paths:
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            raise ModelError(f"{path} cannot be removed ({error.strerror})") from error


def _in_hub_cache() -> Iterator[LocalModel]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, ValueError, OSError):
        return
    for repo in sorted(cache.repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model" or not repo.revisions:
            continue
        newest = max(repo.revisions, key=lambda revision: revision.last_modified)
        snapshot = newest.snapshot_path
        ggufs = sorted(filter(names_model, snapshot.rglob("*.gguf")))
        if ggufs and not any(snapshot.glob("*.safetensors")):
            yield from (_of_gguf(_short(file), HUB, file) for file in ggufs)
            continue
        found = _of_folder(repo.repo_id, HUB, snapshot)
        yield replace(found, path=repo.repo_path, nbytes=repo.size_on_disk)


def _in_folder(root: Path, place: str) -> Iterator[LocalModel]:
    for config in sorted(root.rglob("config.json")):
        if not ggufs_within(config.parent):
            yield _of_folder(_short(config.parent), place, config.parent)
    for file in sorted(filter(names_model, root.rglob("*.gguf"))):
        yield _of_gguf(_short(file), place, file)


def _short(path: Path) -> str:
    home = Path.home()
    return str(Path("~") / path.relative_to(home)) if path.is_relative_to(home) else str(path)


def _of_folder(name: str, place: str, folder: Path) -> LocalModel:
    found = LocalModel(name, place, folder, bytes_of(folder))
    try:
        config = read_config(folder)
        context = config.get("max_position_embeddings")
        context = context if type(context) is int else None
        found = replace(found, architecture=config["model_type"], max_context=context)
        require_weights(folder, name)
        if missing := _missing(folder):
            finish = f"kvlite pull {name}" if place == HUB else "get them again"
            raise ModelError(f"incomplete, {missing} is missing: {finish}")
    except ModelError as error:
        return replace(found, flaw=str(error))
    return found


def _missing(folder: Path) -> str:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return ""
    try:
        with sound():
            names = sorted(set(from_json(index.read_bytes())["weight_map"].values()))
            return next((name for name in names if not (folder / name).is_file()), "")
    except (OSError, Damaged):
        return index.name


def _of_gguf(name: str, place: str, file: Path) -> LocalModel:
    try:
        found = LocalModel(name, place, file, file.stat().st_size)
    except OSError:
        return LocalModel(name, place, file, 0, flaw=f"{file} is not there")
    try:
        header = read_header(file)
        context = header.fields.get(f"{header.architecture}.context_length")
        context = context if type(context) is int else None
        nbytes = sum(path.stat().st_size for path in header.paths)
        found = replace(found, nbytes=nbytes, architecture=header.architecture, max_context=context)
        found = replace(found, architecture=model_type(header))
    except ModelError as error:
        return replace(found, flaw=str(error))
    except OSError as error:
        return replace(found, flaw=f"{file} cannot be read ({error.strerror})")
    return found
