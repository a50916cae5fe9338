"""UNComp: layers and heads grouped by the effective rank of their queries."""

from dataclasses import dataclass, replace
from functools import cached_property

from kvlite.methods.base import LayerView, Method
from kvlite.methods.capabilities import Decoding, Needs, Prefilling, TokenPruning
from kvlite.methods.rank import layer_groups
from kvlite.methods.scored import Observed
from kvlite.methods.scores import pool, window_rows
from kvlite.methods.select import attended_tokens
from kvlite.methods.types import KVHeadGroup, Position, Tensor
from kvlite.model.calibration import Calibration
from kvlite.model.shape import ModelShape


@dataclass(frozen=True)
class UNComp(Observed):
    """Gives larger budgets to heads whose queries spread in more directions. The last few tokens
    score entries; while answering, each new token evicts the entry with the lowest score. With
    `stage`, tokens are also dropped between groups of layers, so that prefill is faster.

    The paper has two groups of heads, the lower one with half the budget of the other. Groups come
    from a calibration of the model. The paper does not force the last tokens to go on between
    layers; kvlite does, because the next token depends on them.

    Attributes:
        window: the observation window: last tokens, which score the others and stay.
        stage: drop tokens between layers (the paper's group-stage, else its group).
        least: with `stage`, tokens that the last group of layers gets.
        delete: number of KV heads in each layer, those of the lowest rank, that keep nothing; the
            most similar head's output, by the window's attention, replaces theirs.
    """

    name = "uncomp"
    summary = "budgets heads by their entropy; can also read faster"
    paper = "UNComp: Can Matrix Entropy Uncover Sparsity?, section 3.3"

    window: int = 8
    stage: bool = False
    least: int = 1536
    delete: int = 0
    pool: int = 7
    groups: int = 2

    at_least = {"delete": 0}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("window", 1 <= self.window <= 1024, "from 1 to 1024")
        self.require("least", self.least >= self.window, "as many as the window, or more")

    def fitted(self, shape: ModelShape, calibration: Calibration | None) -> Method:
        most = shape.kv_heads - 1
        self.require("delete", self.delete <= most, f"at most {most} with this model")
        return super().fitted(shape, calibration)

    @property
    def groups_layers(self) -> bool:
        return self.stage or self.layers == "rank"

    needs_calibration = True

    @cached_property
    def needs(self) -> Needs:
        return Needs(queries=self.window, attention=True)

    @cached_property
    def prefilling(self) -> Prefilling:
        return Prefilling(
            pruning=TokenPruning(self.token_budgets, self.prune_tokens) if self.stage else None,
            head_substitutes=self.head_substitutes if self.delete else None,
        )

    @cached_property
    def decoding(self) -> Decoding:
        return Decoding(rows=self.window, evict=self.evict)

    @property
    def reserved_per_layer(self) -> int:
        return self.window

    @property
    def min_budget(self) -> int:
        # The smallest budgets, half as large, hold their window and one entry.
        return 2 * (self.window + 1)

    def head_substitutes(self, view: LayerView) -> dict[int, int]:
        """The heads that rank last, and those that look where they do, once in a conversation:
        cosine of the window's attention (the paper's "Result of Extreme Compression")."""
        from torch.nn.functional import cosine_similarity

        if any(head_group.head_alias for head_group in view.head_groups):
            return {}
        lowest = self.measured.heads_by_rank(view.layer)[-self.delete :]
        window = view.window.last(self.window)
        rows: dict[int, Tensor] = {}
        for head_group in view.head_groups:
            weights = window_rows(head_group, window)
            positions = window.to_scoring_device(head_group.positions[:, :, : head_group.used])
            place = positions[:, :, None].long().expand_as(weights)
            # By position, since heads may differ after earlier turns.
            looks = weights.new_zeros(*weights.shape[:3], window.end).scatter_(3, place, weights)
            rows.update(
                zip(head_group.heads, (each.flatten() for each in looks.unbind(1)), strict=True)
            )
        kept = [head for head in sorted(rows) if head not in lowest]
        return {
            head: max(kept, key=lambda other: float(cosine_similarity(rows[head], rows[other], 0)))
            for head in lowest
        }

    def evict(self, head_group: KVHeadGroup, budget: int, position: Position) -> Tensor:
        """Of the entries before the window, the one with the least attention in its rows, pooled
        as while reading."""
        order = head_group.positions.argsort(-1)
        older = order[..., : 1 - self.window] if self.window > 1 else order
        votes = pool(head_group.scores().gather(-1, older), self.pool, self.pooling)
        return older.gather(-1, votes.argmin(-1, keepdim=True)).squeeze(-1)

    def token_budgets(self, layers: int, new: int, seen: int) -> list[int]:
        """Evenly falling from the model's context, in the first group of layers, to `least` in
        the last (Eq. 12 and 13)."""
        groups = layer_groups(self.measured.layer_ranks, self.drop)
        most, steps = self.measured.max_context, max(groups)
        fall = (most - min(self.least, most)) / max(1, steps)
        return [min(new, int(most - fall * group)) for group in groups]

    def prune_tokens(self, view: LayerView, through: int, width: int) -> Tensor:
        """The window, and the tokens it looks at most, all heads together."""
        shown = replace(view, window=view.window.last(self.window))
        return attended_tokens(shown, through, width)
