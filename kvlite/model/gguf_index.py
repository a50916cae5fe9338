"""Where a model's weights lie in the GGUF file it comes from, by transformers' names.

The index is a file beside the model's config.json, so that a plan and loading need no look at the
GGUF's header. What llama.cpp's converter changes in tensors is undone while they are read: rows of
queries and keys are in another order (llama), norms have 1 added (gemma).
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlite.config.atomic_file import replaced
from kvlite.errors import ModelError
from kvlite.model.files import GGUF_INDEX, Stored
from kvlite.model.gguf_header import read_header
from kvlite.model.shape import GROUPS, described, group_of
from kvlite.ops.blocks import FORMATS, BlockFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# By GGUF's names of architectures: what is added to norms. Others are read by transformers alone.
_ADDED_TO_NORMS = {"llama": 0, "qwen2": 0, "qwen3": 0, "phi3": 0, "gemma2": 1, "gemma3": 1}
_PERMUTED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a GGUF file.

    Attributes:
        stored: where it lies, with ggml's name of its type.
        heads: whose rows are in another order; 0 if they are not.
        added: what was added to its numbers.
    """

    stored: Stored
    heads: int = 0
    added: float = 0

    @property
    def form(self) -> BlockFormat | None:
        """The format of its blocks, if products with them are known."""
        return FORMATS.get(self.stored.kind) if len(self.stored.shape) == 2 else None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stored.end - self.stored.begin


@dataclass(frozen=True)
class GGUFIndex:
    """The weights of a GGUF file.

    Attributes:
        path, nbytes, changed: the file, its size, and when it was written, in ns.
        tensors: by transformers' names of parameters.
    """

    path: Path
    nbytes: int
    changed: int
    tensors: dict[str, GGUFTensor] = field(compare=False, repr=False)

    def is_of(self, file: Path) -> bool:
        """Whether this is the index of a file as it is now."""
        about = file.stat()
        return (self.path, self.nbytes, self.changed) == (
            file.absolute(),
            about.st_size,
            about.st_mtime_ns,
        )

    @property
    def packs(self) -> bool:
        """Whether matrices of the model's layers can stay packed."""
        return any(each.form and ".layers." in name for name, each in self.tensors.items())

    @property
    def largest(self) -> int:
        """Bytes of the tensor that takes most while it is read for a CPU."""
        return max(
            each.nbytes if each.form else 4 * each.stored.count for each in self.tensors.values()
        )

    def weight_bytes(self, itemsize: int) -> dict[str, int]:
        """Bytes by group of weights that stay as they are in the file, where there are products
        with them; others have `itemsize` bytes a number."""
        sizes = dict.fromkeys(GROUPS, 0)
        for name, tensor in self.tensors.items():
            nbytes = tensor.nbytes if tensor.form else itemsize * tensor.stored.count
            sizes[group_of(name)] += nbytes
        return sizes

    @contextmanager
    def reading(self) -> Iterator["GGUFReader"]:
        """The file, opened. Raises ModelError if it is not what it was."""
        try:
            with self.path.open("rb") as file:
                if not self.is_of(self.path):
                    raise ModelError(f"{self.path} was changed: name the model once more")
                yield GGUFReader(self, file)
        except OSError as error:
            raise ModelError(
                f"{self.path} cannot be read ({error.strerror}), which has this model's weights: "
                "put it back, or name another model"
            ) from error


class GGUFReader:
    """Reads an index's tensors, one at a time."""

    def __init__(self, index: GGUFIndex, file: Any) -> None:
        self.index, self.file = index, file

    def blocks(self, name: str) -> "Tensor":
        """A tensor's bytes, `(rows, bytes of a row)` uint8, with rows as transformers has them."""
        import numpy as np
        import torch

        tensor = self.index.tensors[name]
        raw = np.empty(tensor.nbytes, np.uint8)
        self.file.seek(tensor.stored.begin)
        if self.file.readinto(raw) != len(raw):
            raise OSError(0, "it has come to its end")
        rows = torch.from_numpy(raw).view(tensor.stored.count // tensor.stored.shape[-1], -1)
        if not tensor.heads:
            return rows
        return rows.view(tensor.heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)

    def numbers(self, name: str, dtype: "torch.dtype") -> "Tensor":
        """A tensor's numbers, whatever its blocks."""
        import torch
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.index.tensors[name]
        plain = dequantize(self.blocks(name).numpy(), GGMLQuantizationType[tensor.stored.kind])
        numbers = torch.from_numpy(plain).float().view(tensor.stored.shape)
        return (numbers - tensor.added if tensor.added else numbers).to(dtype)


def read_index(folder: Path) -> GGUFIndex | None:
    """The index in a model's folder, if there is one, and its file is there."""
    try:
        found = json.loads((folder / GGUF_INDEX).read_bytes())
        path = Path(found["path"])
        tensors = {
            name: GGUFTensor(Stored(path, kind, tuple(shape), begin, end), heads, added)
            for name, (kind, shape, begin, end, heads, added) in found["tensors"].items()
        }
        index = GGUFIndex(path, found["nbytes"], found["changed"], tensors)
        return index if tensors and index.is_of(path) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def gguf_alone(folder: Path) -> GGUFIndex | None:
    """The index of a model whose weights are in a GGUF file and nowhere else."""
    return None if any(folder.glob("*.safetensors")) else read_index(folder)


def write_index(folder: Path, file: Path) -> None:
    """Index a GGUF file in the folder of its config.json, unless that is done. An index without
    tensors says that the file is for transformers alone.

    Raises:
        ModelError, OSError: it is damaged, or one of the two cannot be read or written.
    """
    try:
        found = json.loads((folder / GGUF_INDEX).read_bytes())
        known = GGUFIndex(Path(found["path"]), found["nbytes"], found["changed"], {})
        if known.is_of(file):
            return
    except (OSError, ValueError, KeyError, TypeError):
        pass
    about = file.stat()
    made = {}
    for name, tensor in _tensors(folder, file).items():
        where = tensor.stored
        made[name] = where.kind, where.shape, where.begin, where.end, tensor.heads, tensor.added
    with replaced(folder / GGUF_INDEX) as written:
        index = {"path": str(file.absolute()), "nbytes": about.st_size}
        index |= {"changed": about.st_mtime_ns, "tensors": made}
        written.write(json.dumps(index).encode())


def _tensors(folder: Path, file: Path) -> dict[str, GGUFTensor]:
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    from kvlite.model.making import meta_module

    header = read_header(file)
    added = _ADDED_TO_NORMS.get(header.architecture)
    if added is None or header.order != "<":
        return {}
    config, _ = described(folder)
    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    known = get_tensor_name_map(kinds[header.architecture], config.num_hidden_layers)
    found = {}
    for name, _ in meta_module(config, torch.bfloat16).named_parameters(remove_duplicate=False):
        owner, _, own = name.rpartition(".")
        called = f"{known.get_name(owner)}.{own}"
        if called not in header.tensors:
            continue
        permuted = _PERMUTED.get(called.split(".")[-2]) if header.architecture == "llama" else None
        heads = getattr(config, permuted) if permuted else 0
        norm = added if "norm" in called and own == "weight" else 0
        found[name] = GGUFTensor(header.tensors[called], heads, norm)
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    return found
