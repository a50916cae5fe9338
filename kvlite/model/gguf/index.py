"""Where a model's weights lie in the GGUF file it comes from, by transformers' names.

The index is a file beside the model's config.json, so that a plan and loading need no look at the
GGUF's header.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kvlite.config.atomic_file import replaced
from kvlite.config.checked_file import Damaged, from_json, sound, tuples
from kvlite.errors import ModelError
from kvlite.model.files import GGUF_INDEX, Stored
from kvlite.model.shape import GROUPS, group_of
from kvlite.ops.blocks import FORMATS, BlockFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# A function of `model.gguf.undo` that gives an order, and what it takes besides a length.
Order = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class GGUFTensor:
    """A parameter in a GGUF file.

    Attributes:
        pieces: where it lies, with ggml's names of types; one piece's rows follow the other's. None
            if it is zero.
        shape: transformers' sizes.
        rows, columns: the order that these are brought into.
        transposed: whether the file has the last two axes the other way round.
        numbers: the function of `model.gguf.undo` that its numbers go through.
    """

    pieces: tuple[Stored, ...]
    shape: tuple[int, ...]
    rows: Order | None = None
    columns: Order | None = None
    transposed: bool = False
    numbers: str = ""

    @property
    def forms(self) -> tuple[BlockFormat, ...]:
        """The formats of its blocks, if it can stay packed: one where all pieces have the same."""
        found = tuple(FORMATS.get(piece.kind) for piece in self.pieces)
        is_alike = len({*found}) == 1
        if self.numbers or len(self.shape) not in (2, 3) or (self.rows and not is_alike):
            return ()
        if len(self.shape) == 2 and (self.transposed or not is_alike):
            return ()
        stacked = all(len(piece.shape) == 3 for piece in self.pieces)
        if len(self.shape) == 3 and (
            self.columns or not (stacked or (self.by_expert and is_alike))
        ):
            return ()
        known = tuple(each for each in found if each is not None)
        if len(known) < len(found):
            return ()
        return known[:1] if is_alike else known

    @property
    def by_expert(self) -> bool:
        """Whether each piece is a matrix of one expert."""
        return len(self.shape) == 3 and all(len(piece.shape) == 2 for piece in self.pieces)

    @property
    def block_sizes(self) -> list[tuple[int, ...]]:
        """The sizes of its blocks, of each of its `forms`: `(outputs, bytes of one)`, of experts
        `(experts, outputs, bytes of one)`."""
        outputs, inputs = [piece.shape[-2] for piece in self.pieces], self.pieces[0].shape[-1]
        experts = self.shape[:-2]
        if len(self.forms) == 1:
            outputs = [sum(outputs) // (experts[0] if self.by_expert else 1)]
        return [
            (*experts, count, inputs // form.inputs * form.nbytes)
            for count, form in zip(outputs, self.forms, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return sum(piece.end - piece.begin for piece in self.pieces)

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)


@dataclass(frozen=True)
class GGUFIndex:
    """The weights of a GGUF file.

    Attributes:
        files: the file, or those that the model is split into: each with its size, and when it was
            written, in ns.
        tensors: by transformers' names of parameters.
    """

    files: tuple[tuple[Path, int, int], ...]
    tensors: dict[str, GGUFTensor] = field(compare=False, repr=False)

    @property
    def path(self) -> Path:
        """The file, or the first one."""
        return self.files[0][0]

    def is_current(self) -> bool:
        """Whether its files are what they were."""
        return all(_stated(path) == (path, size, changed) for path, size, changed in self.files)

    @property
    def is_quantized(self) -> bool:
        """Whether matrices of the model's layers are in blocks."""
        packed = (name for name, each in self.tensors.items() if each.forms)
        return any(".layers." in name for name in packed) or bool(self.unpacked)

    @property
    def largest(self) -> int:
        """Bytes of the tensor that takes most while it is read for a CPU."""
        return max(each.nbytes if each.forms else 4 * each.count for each in self.tensors.values())

    @property
    def unpacked(self) -> dict[str, int]:
        """ggml's types of matrices within layers that cannot stay packed, with how many numbers
        these have."""
        found: dict[str, int] = {}
        for name, each in self.tensors.items():
            if ".layers." not in name or each.forms:
                continue
            for piece in each.pieces:
                if piece.kind not in ("F32", "F16", "BF16"):
                    found[piece.kind] = found.get(piece.kind, 0) + piece.count
        return found

    def weight_bytes(self, itemsize: int, layer_kinds: Sequence[str] = ()) -> dict[str, int]:
        """Bytes by group of weights that stay as they are in the file, where there are products
        with them; others have `itemsize` bytes a number."""
        sizes = dict.fromkeys(GROUPS, 0)
        for name, tensor in self.tensors.items():
            if not name.startswith("mtp."):
                nbytes = tensor.nbytes if tensor.forms else itemsize * tensor.count
                sizes[group_of(name, layer_kinds)] += nbytes
        return sizes

    @contextmanager
    def reading(self) -> Iterator["GGUFReader"]:
        """The files, opened. Raises ModelError if they are not what they were."""
        try:
            with ExitStack() as opened:
                files = {path: opened.enter_context(path.open("rb")) for path, *_ in self.files}
                if not self.is_current():
                    raise ModelError(f"{self.path} was changed: name the model once more")
                yield GGUFReader(self, files)
        except OSError as error:
            raise ModelError(
                f"{self.path} cannot be read ({error.strerror}), which has this model's weights: "
                "put it back, or name another model"
            ) from error


class GGUFReader:
    """Reads an index's tensors, one at a time."""

    def __init__(self, index: GGUFIndex, files: Mapping[Path, IO[bytes]]) -> None:
        self.index, self.files = index, files

    def blocks(self, name: str) -> "list[Tensor]":
        """The bytes of a tensor that can stay packed, a piece for each of its `forms`: `(rows,
        bytes of a row)` uint8, of experts `(experts, rows, bytes of a row)`, with rows as
        transformers has them."""
        import torch

        tensor = self.index.tensors[name]
        pieces = [self._rows(piece) for piece in tensor.pieces]
        if tensor.by_expert:
            pieces = [torch.cat(pieces)]
        if len(tensor.shape) == 3:
            pieces = [rows.unflatten(0, (tensor.shape[0], -1)) for rows in pieces]
        if len({piece.kind for piece in tensor.pieces}) == 1:
            pieces = [torch.cat(pieces, -2) if len(pieces) > 1 else pieces[0]]
        if tensor.rows is None:
            return pieces
        return [pieces[0].index_select(-2, _order(tensor.rows, pieces[0].shape[-2]))]

    def numbers(self, name: str, dtype: "torch.dtype") -> "Tensor":
        """A tensor's numbers, whatever its blocks."""
        import torch

        from kvlite.model.gguf import undo

        tensor = self.index.tensors[name]
        if not tensor.pieces:
            return torch.zeros(tensor.shape, dtype=dtype)
        pieces = [self._numbers(piece) for piece in tensor.pieces]
        axis = -1 if pieces[0].dim() == 1 or name.endswith("bias") else -2
        if tensor.numbers:
            whole = undo.NUMBERS[tensor.numbers](pieces)
        else:
            whole = torch.cat(pieces, axis) if len(pieces) > 1 else pieces[0]
        if tensor.rows is not None:
            whole = whole.index_select(axis, _order(tensor.rows, whole.shape[axis]))
        if tensor.columns is not None:
            whole = whole[..., _order(tensor.columns, whole.shape[-1])]
        if tensor.transposed:
            whole = whole.transpose(-2, -1)
        return whole.reshape(tensor.shape).to(dtype)

    def columns(self, name: str) -> "Tensor | None":
        """The order that a packed tensor's columns are to be brought into, `(inputs,)`."""
        tensor = self.index.tensors[name]
        return None if tensor.columns is None else _order(tensor.columns, tensor.shape[-1])

    def _rows(self, piece: Stored) -> "Tensor":
        import numpy as np
        import torch

        raw = np.empty(piece.end - piece.begin, np.uint8)
        file = self.files[piece.path]
        file.seek(piece.begin)
        if file.readinto(raw) != len(raw):  # type: ignore[attr-defined]
            raise OSError(0, "it has come to its end")
        return torch.from_numpy(raw).view(piece.count // piece.shape[-1], -1)

    def _numbers(self, piece: Stored) -> "Tensor":
        import torch
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        plain = dequantize(self._rows(piece).numpy(), GGMLQuantizationType[piece.kind])
        return torch.from_numpy(plain).float().view(piece.shape)


def _order(order: Order, length: int) -> "Tensor":
    from kvlite.model.gguf import undo

    name, given = order
    return undo.ORDERS[name](length, *given)


def _stated(path: Path) -> tuple[Path, int, int]:
    about = path.stat()
    return path, about.st_size, about.st_mtime_ns


def read_index(folder: Path) -> GGUFIndex | None:
    """The index in a model's folder, if there is one, and its files are there."""
    try:
        found = from_json((folder / GGUF_INDEX).read_bytes())
        with sound():
            files = tuple((Path(path), size, changed) for path, size, changed in found["files"])
            tensors = {name: _read(tensor, files) for name, tensor in found["tensors"].items()}
            index = GGUFIndex(files, tensors)
            return index if index.tensors and index.is_current() else None
    except (OSError, Damaged):
        return None


def _read(stored: Any, files: tuple[tuple[Path, int, int], ...]) -> GGUFTensor:
    pieces, *others = tuples(stored)
    return GGUFTensor(tuple(Stored(files[file][0], *rest) for file, *rest in pieces), *others)


def gguf_alone(folder: Path) -> GGUFIndex | None:
    """The index of a model whose weights are in a GGUF file and nowhere else."""
    return None if any(folder.glob("*.safetensors")) else read_index(folder)


def write_index(
    folder: Path, paths: Sequence[Path], digest: str, tensors: dict[str, GGUFTensor]
) -> None:
    """Write an index beside a model's config.json, with the digest of its files. Raises OSError if
    it cannot be written."""
    numbers = {path: number for number, path in enumerate(paths)}
    made = {}
    for name, each in tensors.items():
        pieces = [(numbers[at.path], at.kind, at.shape, at.begin, at.end) for at in each.pieces]
        made[name] = pieces, each.shape, each.rows, each.columns, each.transposed, each.numbers
    files = [(str(path.absolute()), size, changed) for path, size, changed in map(_stated, paths)]
    with replaced(folder / GGUF_INDEX) as written:
        written.write(json.dumps({"digest": digest, "files": files, "tensors": made}).encode())
