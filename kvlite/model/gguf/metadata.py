"""What a GGUF file says of its model, read key by key.

What nobody asked for is known at the end: a file that says more of its model than is understood
would be answered wrongly.
"""

import re
import struct
from math import isfinite
from pathlib import Path
from typing import Any

from kvlite.errors import ModelError
from kvlite.model.files import Stored
from kvlite.model.gguf.header import Header

# The largest tensor that belongs to a config, such as frequencies of positions.
_MOST_NUMBERS = 1 << 16
_PLAIN = {"F32": "f", "F16": "e"}
# What does not change what a model says, or is checked by the tensors themselves.
_HARMLESS = {
    "vocab_size",
    "pooling_type",
    "tensor_data_layout",
    "attention.value_length",
    "rope.scaling.finetuned",
}


class Metadata:
    """The keys of a header that belong to its architecture.

    Attributes:
        tensors: by GGUF's names.
        layers: decoder layers.
        predicted: further ones, which tell tokens after the next.
        tensors_read: small tensors that belong to the config.
    """

    def __init__(self, header: Header) -> None:
        self.header = header
        self.tensors = header.tensors
        self._prefix = f"{header.architecture}."
        self._read: set[str] = set()
        self.tensors_read: set[str] = set()
        blocks = self.whole("block_count")
        # Layers behind the others tell tokens after the next.
        self.predicted = self.whole("nextn_predict_layers", 0)
        self.layers = blocks - self.predicted
        if not 0 < self.layers <= blocks <= len(self.tensors):
            raise self.wrong("block_count", f"there are {len(self.tensors)} tensors")

    def value(self, key: str) -> Any:
        """What the file says, None if it is silent."""
        self._read.add(key)
        return self.header.fields.get(self._prefix + key)

    def number(self, key: str, default: Any = None) -> Any:
        """A number or flag. Raises ModelError if it is something else, or missing without a
        default."""
        found = self.value(key)
        if found is None and default is not None:
            return default
        if not isinstance(found, int | float) or not isfinite(found):
            raise self.wrong(key, "a number is needed")
        # Files have 7 digits: 9.99999974e-06 was 1e-05.
        return float(f"{found:.7g}") if isinstance(found, float) else found

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number; of a list by layer, its only value. Raises as `number`."""
        found = self.value(key)
        if isinstance(found, tuple) and len({*found}) == 1:
            found = found[0]
        if found is None and default is not None:
            return default
        if type(found) is not int:
            raise self.wrong(key, "a whole number is needed")
        return found

    def size(self, key: str, default: int | None = None) -> int:
        """As `whole`, from 1 on."""
        found = self.whole(key, default)
        if found < 1:
            raise self.wrong(key, "it must be 1 or more")
        return found

    def read(self, table: str) -> dict[str, Any]:
        """What a config says as the file says it, by a table: `name=key` is a whole number,
        `name~key` any, both perhaps with a default behind a colon; `name?ending` is whether there
        is a tensor whose name ends so. Raises as `number`."""
        made: dict[str, Any] = {}
        for name, kind, key in re.findall(r"(\w+)([=~?])(\S+)", table):
            key, _, default = key.partition(":")
            if kind == "?":
                made[name] = any(each.endswith(key) for each in self.tensors)
            elif kind == "~":
                made[name] = float(self.number(key, float(default) if default else None))
            else:
                made[name] = self.whole(key, int(default) if default else None)
        return made

    def by_layer(self, key: str, default: Any = None) -> list[Any]:
        """A value for each block; one that is given once is that of all."""
        found = self.value(key)
        if found is None:
            found = default
        if not isinstance(found, tuple | list):
            return [self.number(key, default)] * self.layers
        if len(found) < self.layers or not all(isinstance(each, int | float) for each in found):
            raise self.wrong(key, f"{self.layers} numbers are needed")
        return [*found[: self.layers]]

    def has(self, key: str) -> bool:
        """Whether the file has a key at all."""
        return self._prefix + key in self.header.fields

    def rows(self, tensor: str) -> int:
        """Rows of a tensor. Raises ModelError if there is none."""
        return self.stored(tensor).shape[0]

    def stored(self, tensor: str) -> Stored:
        """Where a tensor lies. Raises ModelError if it is missing."""
        found = self.tensors.get(tensor)
        if found is None:
            raise ModelError(
                f"{self.path} has no tensor {tensor!r}, which a {self.header.architecture!r} model "
                "needs: get the file again"
            )
        return found

    def numbers(self, tensor: str) -> list[float] | None:
        """The numbers of a small tensor that belongs to the config; None if it is missing."""
        found = self.tensors.get(tensor)
        if found is None:
            return None
        self.tensors_read.add(tensor)
        if found.kind not in _PLAIN or found.count > _MOST_NUMBERS:
            raise ModelError(f"{self.path}: {tensor} is of type {found.kind}: get the file again")
        with found.path.open("rb") as file:
            file.seek(found.begin)
            read = file.read(found.end - found.begin)
        if len(read) != found.end - found.begin:
            raise ModelError(f"{found.path} is truncated: download it again")
        plain = [*struct.unpack(f"<{found.count}{_PLAIN[found.kind]}", read)]
        if not all(map(isfinite, plain)):
            raise ModelError(f"{self.path}: {tensor} has numbers that are none: get the file again")
        return plain

    def unread(self, harmless: frozenset[str] = frozenset()) -> list[str]:
        """Keys of the architecture that nobody asked for, but for harmless ones."""
        known = self._read | _HARMLESS | harmless
        found = []
        for name, value in self.header.fields.items():
            key = name.removeprefix(self._prefix)
            without_experts = key.startswith("expert_") and value == 0
            if name.startswith(self._prefix) and key not in known and not without_experts:
                found.append(name)
        return found

    def wrong(self, key: str, why: str) -> ModelError:
        """The error of a key that cannot be as it is."""
        found = self.header.fields.get(self._prefix + key)
        is_missing = "is missing" if found is None else f"is {found!r:.60}"
        return ModelError(
            f"{self.path}: {self._prefix}{key} {is_missing}, and {why}: get the file again"
        )

    @property
    def path(self) -> Path:
        """The file, or the first of several."""
        return self.header.paths[0]
