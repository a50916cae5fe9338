"""A model's safetensors files: where each weight lies in them, and which model they are."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from os import SEEK_END
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from kvlite.config.checked_file import from_json, sound
from kvlite.errors import ModelError

if TYPE_CHECKING:
    import torch

# transformers holds all experts in one tensor, made of these, one expert after the other.
_EXPERTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}
# What Granite's files call parts of a layer.
_GRANITE = {
    ".experts.gate_up_proj": ".input_linear.weight",
    ".experts.down_proj": ".output_linear.weight",
    ".router.weight": ".router.layer.weight",
}
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "U8": "uint8"}
# Beside a config.json: where weights lie in a GGUF file (`model.gguf.index`).
GGUF_INDEX = "gguf.json"
# Of each file's bytes, for its fingerprint.
_SAMPLES, _SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        path: of the file.
        kind: the file's name of its type: safetensors' such as BF16, or ggml's such as Q4_K.
        shape: its sizes.
        begin, end: its bytes in the file.
    """

    path: Path
    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def dtype(self) -> "torch.dtype | None":
        """Its type; None if that is neither plain floating point nor bytes."""
        import torch

        name = _DTYPES.get(self.kind)
        return None if name is None else getattr(torch, name)

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)


def _read_header(path: Path) -> tuple[int, dict[str, Stored]]:
    """Where a file's data begins, and its tensors by name. Raises ValueError if it is damaged."""
    with path.open("rb") as file:
        try:
            with safe_open(path, "np"):  # checks the header, also against the file's length
                pass
        except SafetensorError as error:
            raise ValueError(f"{path.name} is damaged or cut short: {error}") from None
        length = int.from_bytes(file.read(8), "little")
        header = from_json(file.read(length))
    start, tensors = 8 + length, dict[str, Stored]()
    with sound():
        header.pop("__metadata__", None)
        for name, about in header.items():
            begin, end = about["data_offsets"]
            shape = tuple(about["shape"])
            tensors[name] = Stored(path, about["dtype"], shape, start + begin, start + end)
    return start, tensors


def stored_weights(folder: Path) -> dict[str, Stored]:
    """Every tensor of the model in `folder` by its name there, from the files that transformers
    would load. Raises OSError, ValueError if files are missing or damaged."""
    names = ["model.safetensors"]
    if not (folder / names[0]).is_file():
        with sound():
            index = from_json((folder / "model.safetensors.index.json").read_bytes())
            names = sorted(set(index["weight_map"].values()))
    tensors: dict[str, Stored] = {}
    for name in names:
        tensors |= _read_header(folder / name)[1]
    return tensors


def fingerprint(folder: Path) -> str:
    """A model's weights in 16 digits: their names, types and shapes, and 64 samples of each file's
    bytes, so that a fine-tuned copy has another one. Of a GGUF file, the digest of its header and
    of samples. Raises ModelError if a file of weights is damaged, gone, or cannot be read."""
    digest = hashlib.sha256()
    try:
        # `glob` finds nothing in a folder that it may not read, and says nothing.
        paths = sorted(each for each in folder.iterdir() if each.match("*.safetensors"))
        if not paths and (index := folder / GGUF_INDEX).is_file():
            path = index
            with sound():
                return str(from_json(index.read_bytes())["digest"])
        for path in paths:
            begin, stored = _read_header(path)
            tensors = sorted((name, each.kind, each.shape) for name, each in stored.items())
            digest.update(json.dumps(tensors).encode())
            with path.open("rb") as file:
                add_samples(digest, file, begin)
    except ValueError as error:
        raise ModelError(
            f"the model in {folder} cannot be loaded: {path.name} is damaged, get it again"
        ) from error
    except OSError as error:
        why = error.strerror or str(error)
        raise ModelError(
            f"the model's files in {folder} cannot be read ({why}): put them back, or check their "
            "permissions"
        ) from error
    return digest.hexdigest()[:16]


def add_samples(digest: Any, file: IO[bytes], begin: int) -> None:
    """Add samples of a file's bytes from `begin` on to a digest."""
    last = max(0, file.seek(0, SEEK_END) - begin - _SAMPLE_BYTES)
    for sample in range(_SAMPLES):
        file.seek(begin + last * sample // (_SAMPLES - 1))
        digest.update(file.read(_SAMPLE_BYTES))


def parts_of(name: str, stored: dict[str, Stored]) -> list[Stored]:
    """The stored tensors that make up a parameter, in order; none if it is not there. Names are
    transformers', such as `model.layers.0.mlp.experts.down_proj`."""
    body = name.removeprefix("model.")
    other = name.replace(".mlp.", ".block_sparse_moe.")
    names = [name, body, f"backbone.{body}", other, other.removeprefix("model.")]
    if ".experts." in name:  # packed ones are several tensors, such as down_proj_blocks
        names.append("_".join(name.rsplit(".", 1)))
    names += [name.removesuffix(end) + own for end, own in _GRANITE.items() if name.endswith(end)]
    # Where a language model is one part of several, by the names of transformers 4 and 5.
    for known in (*names, f"language_model.{name}", f"model.language_{name}"):
        if known in stored:
            return [stored[known]]
        experts, _, kind = known.rpartition(".")
        for parts in _EXPERTS.get(kind, ()) if experts.endswith(".experts") else ():
            found = list(_of_experts(experts, parts, stored))
            if found:
                return found
    return []


def _of_experts(
    experts: str, parts: tuple[str, ...], stored: dict[str, Stored]
) -> Iterator[Stored]:
    expert = 0
    while f"{experts}.{expert}.{parts[0]}.weight" in stored:
        for part in parts:
            tensor = stored.get(f"{experts}.{expert}.{part}.weight")
            if tensor is not None:
                yield tensor
        expert += 1


def fit(parts: list[Stored], shape: tuple[int, ...]) -> bool:
    """Whether parts, one after the other along the rows, are a parameter of this shape."""
    if len(parts) == 1 and parts[0].shape == shape:
        return True
    rows, rest = divmod(prod(shape[:2]), len(parts))
    return len(shape) == 3 and not rest and all(part.shape == (rows, shape[2]) for part in parts)
