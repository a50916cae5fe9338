"""Models that Ollama keeps: manifests that name GGUF blobs.

Source: Ollama's own layout, `manifests/HOST/NAMESPACE/MODEL/TAG` and `blobs/sha256-DIGEST`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from kvlite.config.checked_file import Damaged, from_json, sound
from kvlite.errors import ModelError

PREFIX = "ollama:"
_WEIGHTS = "application/vnd.ollama.image.model"
_ADAPTER = "application/vnd.ollama.image.adapter"
_LIBRARY = ("registry.ollama.ai", "library")


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
