"""Keep entries at random: the control that a method must beat."""

from dataclasses import dataclass

from kvlite.methods.base import LayerView, Method
from kvlite.methods.select import with_ends
from kvlite.methods.types import KVHeadGroup, Selection, Tensor


@dataclass(frozen=True)
class Random(Method):
    """Keeps uniformly random entries, and the last `window` as SnapKV does.

    Attributes:
        window: last tokens that stay.
        seed: seed of the draw, which is the same for the same seed, layer and length.
    """

    name = "random"
    summary = "keeps tokens at random; the control of every comparison"
    paper = "none; the control every selection is compared with"

    window: int = 32
    seed: int = 0

    at_least = {"window": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("seed", abs(self.seed) < 1 << 40, "within 2^40 of 0")

    @property
    def min_budget(self) -> int:
        return self.window + 1

    def select(self, view: LayerView) -> list[Selection]:
        import torch

        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + view.layer)

        def drawn(head_group: KVHeadGroup) -> Tensor:
            shape = (*head_group.positions.shape[:2], head_group.used - self.window)
            scores = torch.rand(shape, generator=generator).to(head_group.residual_keys.device)
            return with_ends(scores, head_group, view.budget - self.window, 0, self.window)

        return view.keep(drawn(head_group) for head_group in view.head_groups)
