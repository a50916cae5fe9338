"""Where each weight lies in a folder's safetensors files.

Source: the safetensors format (eight bytes of length, a JSON header, then the tensors' bytes), and
transformers' names, which join a layer's experts where checkpoints keep them apart.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LONGEST_HEADER = 100_000_000

# What transformers' tensor of all experts is made of, one expert after the other.
_EXPERTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        path: of the file.
        kind: safetensors' name of its type, such as BF16.
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
        """Its type; None if that is no plain floating point."""
        import torch

        name = _DTYPES.get(self.kind)
        return None if name is None else getattr(torch, name)

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)


def read_header(path: Path) -> tuple[int, dict[str, Stored]]:
    """Where a file's data begins, and every tensor in it by name.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is damaged, or cut short.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LONGEST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        try:
            header = json.loads(file.read(length))
        except RecursionError:
            raise ValueError("a header that is nested too deeply") from None
    header.pop("__metadata__", None)
    start, size = 8 + length, path.stat().st_size
    tensors = {}
    for name, about in header.items():
        begin, end = about["data_offsets"]
        if not all(type(number) is int for number in (begin, end, *about["shape"])):
            raise ValueError(f"{path.name} is damaged: sizes of {name} are no numbers")
        begin, end = start + begin, start + end
        if not start <= begin <= end <= size:
            raise ValueError(f"{path.name} is cut short: {name} lies beyond its end")
        tensor = Stored(path, about["dtype"], tuple(about["shape"]), begin, end)
        if tensor.dtype is not None and end - begin != tensor.count * tensor.dtype.itemsize:
            raise ValueError(f"{path.name} is damaged: {name} has {end - begin} bytes")
        tensors[name] = tensor
    return start, tensors


def stored_weights(folder: Path) -> dict[str, Stored]:
    """Every tensor of the model in `folder` by its name there, of the files that transformers would
    load.

    Raises:
        OSError, AttributeError, KeyError, TypeError, ValueError: files are missing or damaged.
    """
    names = ["model.safetensors"]
    if not (folder / names[0]).is_file():
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        names = sorted(set(index["weight_map"].values()))
    tensors: dict[str, Stored] = {}
    for name in names:
        tensors |= read_header(folder / name)[1]
    return tensors


def parts_of(name: str, stored: dict[str, Stored]) -> list[Stored]:
    """What a parameter is made of, in order; nothing if it is not there.

    Args:
        name: transformers' name, such as `model.layers.0.mlp.experts.down_proj`.
    """
    for known in _names(name):
        if known in stored:
            return [stored[known]]
        experts, _, kind = known.rpartition(".")
        for parts in _EXPERTS.get(kind, ()) if experts.endswith(".experts") else ():
            found = list(_of_experts(experts, parts, stored))
            if found:
                return found
    return []


def _names(name: str) -> Iterator[str]:
    """What checkpoints may call a parameter."""
    for known in (name, name.replace(".mlp.", ".block_sparse_moe.")):
        yield known
        yield known.removeprefix("model.")


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
