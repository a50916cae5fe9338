"""kvlite's answers, as a user would ask for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import kvlite
from tests.judges.tiny import ANSWER


@dataclass(frozen=True)
class Answered:
    """Tokens, and the log-probabilities of the first, by token."""

    tokens: list[int]
    log_probabilities: np.ndarray[Any, np.dtype[np.float32]]


def ask_kvlite(path: Path, ids: list[int], weights: str = "fp32") -> Answered:
    """Go on greedily after `ids`."""
    return answer(kvlite.load(str(path), device="cpu", weights=weights, recall="off"), ids)


def answer(runner: kvlite.Runner, ids: list[int]) -> Answered:
    """Go on greedily after `ids`."""
    seen: list[Tensor] = []
    kind = type(runner.model)
    logits = kind.logits

    def recorded(model: Any, hidden: Tensor) -> Tensor:
        made: Tensor = logits(model, hidden)
        # Plans run on the meta device.
        if not made.is_meta:
            seen.append(made)
        return made

    with patch.object(kind, "logits", recorded), torch.inference_mode():
        made = runner.generate(ids, max_new_tokens=ANSWER, ignore_eos=True, method="full")
    return Answered(list(made.token_ids), seen[0].flatten().log_softmax(-1).numpy())


def difference(one: Answered, other: Answered) -> float:
    """The greatest difference of log-probabilities."""
    return float(np.abs(one.log_probabilities - other.log_probabilities).max())
