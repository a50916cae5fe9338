"""Where a model is: the embedded one, a folder, a GGUF file, one of Ollama's, or a Hugging Face id.

Source of Ollama's layout: its own, `manifests/HOST/NAMESPACE/MODEL/TAG` that name GGUF files among
`blobs/sha256-DIGEST`.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

from kvlite.config.checked_file import Damaged, from_json, sound
from kvlite.config.settings import EMBEDDED_MODEL
from kvlite.errors import ModelError
from kvlite.model.embedded import embedded_ggufs, fetch_embedded
from kvlite.model.gguf.folder import gguf_folder
from kvlite.model.gguf.header import names_model
from kvlite.model.hub import fetched
from kvlite.model.shape import read_config

PREFIX = "ollama:"
_WEIGHTS = "application/vnd.ollama.image.model"
_ADAPTER = "application/vnd.ollama.image.adapter"
_LIBRARY = ("registry.ollama.ai", "library")


def find_model(
    model: str, notify: Callable[[str], None] | None = None, cancel: Event | None = None
) -> Path:
    """The folder to load `model` from, downloaded if need be: its own, or that of a GGUF file
    (`model.gguf.folder`). Raises ModelError if it does not exist, has a broken config, no weights,
    or those of several models; Stopped if `cancel` was set.

    Args:
        model: `smollm2-135m`, a folder of safetensors or of one GGUF model, a `.gguf` file, one of
            Ollama's such as `ollama:llama3.2:3b`, or a Hugging Face id such as `Qwen/Qwen3-8B`.
        notify: called with a sentence before what takes time.
        cancel: set to stop that.
    """
    require_model(model)
    _have_embedded(model, notify, cancel)
    if file := gguf_file(model):
        return gguf_folder(file, notify, cancel)
    path = _expanded(model)
    return path if path.is_dir() else require_weights(fetched(model, notify, cancel), model)


def require_model(model: str) -> None:
    """Check what can be known before a download, and without importing torch. Raises ModelError as
    `find_model`."""
    path = _expanded(model)
    if model == EMBEDDED_MODEL:
        return
    if path.is_file():
        if path.suffix.lower() != ".gguf" and not model.startswith(PREFIX):
            raise ModelError(f"{model} is a file but not a .gguf: give the model's folder instead")
    elif model and path.is_dir():
        if gguf_file(model) is None:
            require_weights(path, model)
    elif not is_repo(model):
        raise _nowhere(model)


def find_config(
    model: str, notify: Callable[[str], None] | None = None, cancel: Event | None = None
) -> Path:
    """A folder with the config.json of `model`; weights are not needed. Args as for `find_model`.
    Raises ModelError if there is none, or it is broken; Stopped if `cancel` was set."""
    folder = config_here(model)
    if folder is not None:
        return folder
    _have_embedded(model, notify, cancel)
    if file := gguf_file(model):
        require_model(model)
        return gguf_folder(file, notify, cancel, with_tokenizer=False)
    return _configured(fetched(model, notify, cancel, only="config.json"))


def config_here(model: str) -> Path | None:
    """The folder, if `model` is a folder or a config.json on this machine; None if it is a GGUF
    file, a folder with one, or must be looked for. Takes no time and imports nothing. Raises
    ModelError if its config is broken, or there is no such model."""
    path = _expanded(model)
    if path.name == "config.json" and path.is_file():
        return _configured(path.parent)
    if model and path.is_dir():
        return _configured(path) if gguf_file(model) is None else None
    if model != EMBEDDED_MODEL and not path.is_file() and not is_repo(model):
        raise _nowhere(model)
    return None


def folder_here(model: str) -> Path | None:
    """The model's folder, if it is on this machine."""
    if model == EMBEDDED_MODEL and not embedded_ggufs():
        return None
    if file := gguf_file(model):
        return gguf_folder(file)
    path = _expanded(model)
    if model and path.is_dir():
        return path
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json") if is_repo(model) else None
    return Path(cached).parent if isinstance(cached, str) else None


def lasting_name(model: str) -> str:
    """The model's name in any folder: an existing path is made absolute, other names stay."""
    path = _expanded(model)
    local = model not in ("", EMBEDDED_MODEL) and path.exists()
    return str(path.absolute()) if local else model


def _nowhere(model: str) -> ModelError:
    return ModelError(
        f"no model {model!r}: give {EMBEDDED_MODEL!r}, a folder, a .gguf file, "
        "or a Hugging Face id such as Qwen/Qwen3-8B"
    )


def gguf_file(model: str) -> Path | None:
    """The GGUF file that a model comes from; None if it comes from something else. Raises
    ModelError if it is the embedded one, which is not here yet, or a folder with several."""
    if model == EMBEDDED_MODEL:
        if files := embedded_ggufs():
            return files[0]
        raise ModelError(
            f"the model {EMBEDDED_MODEL} is not here yet: `kvlite ask` and `kvlite chat` fetch it, "
            "or name another model (--model)"
        )
    path = _expanded(model)
    if model and path.is_dir():
        found = ggufs_within(path)
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise ModelError(f"{model} has several models: name one of its files ({names})")
        return found[0] if found else None
    return path if path.suffix.lower() == ".gguf" or model.startswith(PREFIX) else None


def ggufs_within(folder: Path) -> list[Path]:
    """The GGUF files that are models of their own in a folder; none where it has safetensors."""
    files = [*folder.glob("*")]
    if any(file.suffix == ".safetensors" for file in files):
        return []
    return sorted(file for file in files if file.suffix.lower() == ".gguf" and names_model(file))


def is_repo(model: str) -> bool:
    """Whether it can be a Hugging Face id."""
    if model.startswith(PREFIX):
        return False
    absolute = _expanded(model).is_absolute()
    return not absolute and not model.startswith((".", "~")) and model.count("/") == 1


def _expanded(model: str) -> Path:
    if model.startswith(PREFIX):
        return ollama_file(model)
    try:
        return Path(model).expanduser()
    except RuntimeError:  # no such user
        return Path(model)


def _have_embedded(model: str, notify: Callable[[str], None] | None, cancel: Event | None) -> None:
    if model == EMBEDDED_MODEL and not embedded_ggufs():
        fetch_embedded(notify, cancel)


def _configured(folder: Path) -> Path:
    read_config(folder)
    return folder


def require_weights(folder: Path, name: str) -> Path:
    """The folder, if it has a sound config and weights; raises ModelError if not."""
    if any(_configured(folder).glob("*.safetensors")):
        return folder
    others = sorted(file.name for pattern in ("*.bin", "*.pt*") for file in folder.glob(pattern))
    held = f" (it holds {', '.join(others[:3])}, which can run code)" if others else ""
    raise ModelError(
        f"{name} has no .safetensors weights{held}: kvlite loads these or a GGUF file, which "
        "`kvlite pull` can get"
    )


def ollama_models() -> Iterator[tuple[str, Path]]:
    """Each model's name, such as `ollama:llama3.2:3b`, and its GGUF file, which may be missing."""
    root = _root()
    for manifest in sorted(root.glob("manifests/*/*/*/*")):
        blob = _blob(root, manifest)
        if blob is not None:
            host, space, model, tag = manifest.relative_to(root / "manifests").parts
            own = "" if host == _LIBRARY[0] else f"{host}/"
            place = "" if (host, space) == _LIBRARY else f"{own}{space}/"
            yield f"{PREFIX}{place}{model}:{tag}", blob


def ollama_file(name: str) -> Path:
    """The GGUF file of a model that `ollama_models` names; without a tag, that called `latest`.
    Raises ModelError if Ollama has no such model here."""
    known = dict(ollama_models())
    for each in (name, f"{name}:latest"):
        if each in known:
            if not known[each].is_file():
                raise ModelError(f"{known[each]} is missing, the file of {name}: pull it again")
            return known[each]
    here = ", ".join(known) or "none"
    raise ModelError(
        f"no model {name!r} in {_root()}: Ollama has {here} there (OLLAMA_MODELS; models with "
        "adapters are none that kvlite runs)"
    )


def _root() -> Path:
    named = os.environ.get("OLLAMA_MODELS")
    return Path(named) if named else Path.home() / ".ollama" / "models"


def _blob(root: Path, manifest: Path) -> Path | None:
    try:
        with sound():
            layers = from_json(manifest.read_bytes())["layers"]
            if any(each["mediaType"] == _ADAPTER for each in layers):
                return None  # a model with an adapter would answer as if it had none
            digests = [str(each["digest"]) for each in layers if each["mediaType"] == _WEIGHTS]
            return root / "blobs" / digests[0].replace(":", "-").replace("/", "-")
    except (OSError, Damaged):
        return None
