"""What each layer of a model does: the chosen method, or its own sliding window."""

from dataclasses import dataclass

from kvlite.methods.base import Method
from kvlite.methods.streaming import Streaming
from kvlite.model.shape import ModelShape


@dataclass(frozen=True)
class Rule:
    """How one layer keeps its cache small.

    Attributes:
        method: what chooses.
        budget: entries a KV head may keep.
        window: tokens a sliding-window layer sees (its own included), None for other layers.
    """

    method: Method
    budget: int
    window: int | None = None


def layer_rules(method: Method, shape: ModelShape, average: int, seen: int) -> list[Rule]:
    """One rule a layer of the model.

    A sliding-window layer holds its window and nothing more, whatever the method; the budget is
    the mean over the layers that see everything.

    Args:
        average: mean entries a KV head and layer.
        seen: tokens read by the end of this turn.
    """
    cut = shape.full_layers
    budgets = dict(zip(cut, method.budgets(len(cut), average, seen), strict=True)) if cut else {}
    return [
        Rule(method, budgets[layer])
        if window is None
        else Rule(Streaming(sinks=0), window, window=window)
        for layer, window in enumerate(shape.windows)
    ]
