"""Measurements of a model for methods that need them: ranks of heads, lazy layers.

Source of the ranks: "UNComp: Can Matrix Entropy Uncover Sparsity?", sections 3.2 and 3.3.
"""

import json
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from kvlite.config.atomic_file import replaced
from kvlite.config.checked_file import Damaged, from_json, sound, tuples
from kvlite.config.paths import data_folder
from kvlite.errors import ModelError
from kvlite.model.files import fingerprint

FORMAT = 1


@dataclass(frozen=True)
class Calibration:
    """One model's measurements, made by `kvlite calibrate`.

    Attributes:
        model: its name when it was measured.
        fingerprint: of the model's files.
        text: what it was measured on.
        samples, tokens: how many pieces of the text, and tokens in each.
        max_context: tokens the model was trained to hold.
        layer_ranks: effective rank of each layer's queries, mean over heads and samples.
        elbow: eigenvalues that count for heads, those before the elbow of their mean curve.
        head_ranks: truncated effective rank of each KV head's queries, by layer; mean over the
            group and samples.
        head_wins: in how many samples a KV head was in the upper half of its layer.
        lazy_shares: attention each layer pays to its sinks and recent tokens, mean over samples.
        lazy_threshold: above which SimLayerKV may call a layer lazy; None if it was not searched.
    """

    model: str
    fingerprint: str
    text: str
    samples: int
    tokens: int
    max_context: int
    layer_ranks: tuple[float, ...]
    elbow: int
    head_ranks: tuple[tuple[float, ...], ...]
    head_wins: tuple[tuple[int, ...], ...]
    lazy_shares: tuple[float, ...]
    lazy_threshold: float | None

    def heads_by_rank(self, layer: int) -> list[int]:
        """KV heads of a layer, the highest rank first."""
        ranks, wins = self.head_ranks[layer], self.head_wins[layer]
        return sorted(range(len(ranks)), key=lambda head: (-wins[head], -ranks[head], head))

    def to_json(self) -> dict[str, Any]:
        """Plain values by name, with the format's number."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, plain: Any, name: str) -> "Calibration":
        """The inverse of `to_json`. Raises ModelError if `plain` is no sound calibration."""
        said = f"{name} is not a calibration of this version, or damaged: make it again with "
        with sound(lambda _: ModelError(f"{said}`kvlite calibrate`")):
            if plain["format"] != FORMAT:
                raise ValueError
            values = {key: tuples(value) for key, value in plain.items() if key != "format"}
            made = cls(**values)
            made._require_sound()
            return made

    def _require_sound(self) -> None:
        per_layer = (self.layer_ranks, self.head_ranks, self.head_wins, self.lazy_shares)
        if len({len(each) for each in per_layer}) != 1:
            raise ValueError
        if len({len(heads) for heads in (*self.head_ranks, *self.head_wins)}) != 1:
            raise ValueError
        numbers = [*self.layer_ranks, *self.lazy_shares, self.lazy_threshold or 0.0]
        numbers += [rank for heads in (*self.head_ranks, *self.head_wins) for rank in heads]
        if not all(isfinite(number) for number in numbers):
            raise ValueError

    def save(self, path: Path) -> None:
        """Write the calibration, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as file:
            file.write((json.dumps(self.to_json(), indent=1) + "\n").encode())


def calibration_path(mark: str) -> Path:
    """The file of a user's calibration of the model with this fingerprint."""
    return data_folder() / "calibrations" / f"{mark}.json"


def find_calibration(folder: Path) -> Calibration | None:
    """The user's calibration of the model in `folder`, else the one that comes with kvlite, if any.
    Raises ModelError if the user's is damaged."""
    return calibration_of(fingerprint(folder))


def calibration_of(mark: str) -> Calibration | None:
    """As `find_calibration`, of the model with this fingerprint."""
    path = calibration_path(mark)
    if not path.is_file():
        path = Path(__file__).with_name("calibrations") / f"{mark}.json"
        if not path.is_file():
            return None
    try:
        plain = from_json(path.read_bytes())
    except (OSError, Damaged) as error:
        raise ModelError(
            f"{path} is not readable: delete it, or make it again with `kvlite calibrate` ({error})"
        ) from None
    found = Calibration.from_json(plain, str(path))
    if found.fingerprint != mark:
        raise ModelError(f"{path} is of another model: delete it, or run `kvlite calibrate`")
    return found
