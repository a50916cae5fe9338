"""Keep entries at random: the control that a method must beat."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvlite.methods.base import LayerView, Method
from kvlite.methods.select import with_ends

if TYPE_CHECKING:
    from kvlite.cache import Selection


@dataclass(frozen=True)
class Random(Method):
    """Entries drawn evenly, and the last `window`, as SnapKV would keep them.

    Attributes:
        window: last tokens that stay.
        seed: the draw; the same for the same seed, layer and length.
    """

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "keeps tokens at random; the control of every comparison"
    paper: ClassVar[str] = "none; the control every selection is compared with"

    window: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        self.require("window", self.window >= 1, "1 or more")
        self.require("seed", abs(self.seed) < 1 << 40, "within 2^40 of 0")

    @property
    def min_budget(self) -> int:
        """The window and one chosen entry."""
        return self.window + 1

    def select(self, view: LayerView) -> "list[Selection]":
        """As many random entries as fit before the window."""
        import torch

        from kvlite.cache import Selection

        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + view.layer)
        selections = []
        for head_group in view.head_groups:
            shape = (*head_group.positions.shape[:2], head_group.used - self.window)
            scores = torch.rand(shape, generator=generator).to(head_group.residual_keys.device)
            chosen = view.budget - self.window
            selections.append(
                Selection(head_group, with_ends(scores, head_group, chosen, 0, self.window))
            )
        return selections
