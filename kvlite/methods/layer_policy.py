"""What each layer of a model does: the chosen method, or its own window."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from kvlite.cache.bits import KVBits
from kvlite.errors import SettingError
from kvlite.methods.aligned import Aligned
from kvlite.methods.allocation import filled
from kvlite.methods.base import LayerView, Method
from kvlite.methods.capabilities import LambdaMask
from kvlite.methods.placement import ON_DEVICE, ScoringBackend
from kvlite.methods.scores import Window, window_rows
from kvlite.methods.streaming import Streaming
from kvlite.methods.types import GroupLength, LayerCache, Selection
from kvlite.model.shape import ModelShape
from kvlite.model.window import LocalWindow

# By how many slots a layer grows while it answers, and by how few where memory is short.
ROOM, LEAST_ROOM = 1024, 64
PROVISION = 4


@dataclass(frozen=True)
class LayerPolicy:
    """How one layer keeps its cache small.

    Attributes:
        method: what chooses.
        budget: entries a KV head may keep.
        window: what the layer sees, if not everything.
        candidate_budget: entries a KV head may keep until all layers are read and share the budget,
            for methods whose layers do.
        partner: the layer that this one is merged with, for methods that merge.
        token_budget: how many of the tokens read it is given, if not all of them.
        bits: how what is kept is quantized, if it is.
    """

    method: Method
    budget: int
    window: LocalWindow | None = None
    candidate_budget: int | None = None
    partner: int | None = None
    token_budget: int | None = None
    bits: KVBits | None = None

    @property
    def chunk(self) -> int | None:
        """The size of the layer's window where that is a chunk."""
        return self.window.size if self.window is not None and self.window.chunked else None

    @property
    def quantize_now(self) -> KVBits | None:
        """How a cut quantizes the layer; None as long as something is still to be dropped."""
        later = self.candidate_budget is not None or self.method.across.resolves_at == "step"
        return None if later or self.partner is not None else self.bits

    @property
    def mask(self) -> LambdaMask | None:
        """What a token of this layer sees, if not everything."""
        mask = self.method.prefilling.mask
        return None if mask is None else mask(self.budget)

    def held(self, lengths: Sequence[GroupLength]) -> list[float]:
        """What counts against the budget: each head group's own entries, or their mean where heads
        share the budget."""
        if not self.method.variable_head_lens:
            return [float(entries) for _, entries in lengths]
        heads = sum(count for count, _ in lengths)
        return [sum(count * entries for count, entries in lengths) / heads] * len(lengths)

    def counted(self, layer: LayerCache) -> list[GroupLength]:
        """The lengths of head groups that count against the budget: without what was merged."""
        return layer.residual_lengths if self.method.across.merging is not None else layer.lengths

    def keeps_all(self, lengths: Sequence[GroupLength]) -> bool:
        """Whether the lengths are within the budget, or the method never cuts any."""
        if not self.method.compresses or (
            self.method.across.merging is not None and self.partner is None
        ):
            return True
        return self.candidate_budget is None and max(self.held(lengths)) <= self.budget

    def remembers(self, layer: LayerCache) -> bool:
        """Whether a layer remembers the attention that its entries get while answering; what a
        reconstruction found stays as it is."""
        return layer.rows > 0 and self.method.prefilling.reconstruction is None

    def capacities(self, lengths: Sequence[GroupLength], room: int = ROOM) -> list[int]:
        """Slots for these lengths and room to grow, up to the budget if the method evicts, or to a
        whole chunk."""
        if not self.method.decoding.bounded and self.chunk is None:
            return [entries + room for _, entries in lengths]
        most = self.chunk or self.budget
        return [
            entries + max(0, min(room, most - ceil(held)))
            for (_, entries), held in zip(lengths, self.held(lengths), strict=True)
        ]

    def settled(self, view: LayerView) -> "LayerPolicy":
        """The policy a layer goes on with once its method has looked at it."""
        with view.window.backend.timed():
            resolving = self.method.across.resolving
            method, budget = resolving.resolve(view) if resolving else (self.method, view.budget)
        candidate_budget = self.candidate_budget if method.across.sharing else None
        return replace(self, method=method, budget=budget, candidate_budget=candidate_budget)

    def cut(self, view: LayerView, room: int) -> LayerCache:
        """What a layer keeps, in storage of its own with `room` to grow. Head groups within the
        budget keep everything."""
        from kvlite.cache import LayerCache, Selection

        within, over = [], view.head_groups
        if self.keeps_all(view.lengths):
            within, over = view.head_groups, []
        elif self.candidate_budget is None:
            held = list(zip(view.head_groups, self.held(view.lengths), strict=True))
            within = [head_group for head_group, each in held if each <= self.budget]
            over = [head_group for head_group, each in held if each > self.budget]
        selections = [Selection.everything(head_group) for head_group in within]
        if over:
            backend = _backend(self.method, view.window.backend)
            view = replace(view, window=replace(view.window, backend=backend))
            shown = replace(
                view, head_groups=over, budget=self.budget, candidate_budget=self.candidate_budget
            )
            with backend.timed():
                substitutes = self.method.prefilling.head_substitutes
                dropped = substitutes(view) if substitutes else {}
                selections += _brought(self.method.select(shown), backend)
            selections = [
                each for every in selections if (each := every.without(dropped)) is not None
            ]
        lengths = [each.length for each in selections]
        sizes = [entries for _, entries in lengths]
        if self.candidate_budget is None:
            sizes = self.capacities(lengths, room)
        layer = LayerCache.gathered(
            selections,
            sizes,
            self.method.decoding.rows,
            bits=self.quantize_now,
            # Whether a cut that quantizes is still to come.
            remember_packed=self.bits is not None
            and self.quantize_now is None
            and self.partner is None,
        )
        self.seed_attention_rows(layer, view.window)
        return layer

    def seed_attention_rows(self, layer: LayerCache, window: Window) -> None:
        """For methods that evict by the last attention rows: let the last queries read be the first
        rows, over what was kept."""
        if not self.method.decoding.rows or self.method.caches_scores:
            return
        last = replace(window.last(self.method.decoding.rows), backend=ON_DEVICE)
        # All rows before the first is remembered: memory may run out in between.
        found = [window_rows(head_group, last).unbind(2) for head_group in layer.head_groups]
        for head_group, rows in zip(layer.head_groups, found, strict=True):
            for row in rows:
                head_group.record(row)


def loses(method: Method, budget: int, seen: int, limit: int, bits: KVBits | None) -> bool:
    """Whether a cache of `budget` mean entries drops or rounds something of `seen` tokens read and
    an answer that ends at `limit`."""
    resolving = method.across.resolving
    least = budget if resolving is None else min(budget, resolving.least)
    grows = method.decoding.append_only and resolving is None
    drops = method.compresses and least < (seen if grows else seen + limit)
    return bits is not None or drops


def can_recall(method: Method) -> bool:
    """Whether a method drops anything that it would look at again: under a mask, what is out of
    sight stays out of sight."""
    return method.compresses and method.prefilling.mask is None


def layer_policies(
    method: Method,
    shape: ModelShape,
    average: int,
    seen: int,
    layers: "Sequence[LayerCache] | None" = None,
    new: int | None = None,
    bits: KVBits | None = None,
) -> list[LayerPolicy]:
    """One policy for each layer of the model.

    A layer with a window holds that and nothing more, whatever the method; the budget is the mean
    over the layers with full attention.

    Args:
        average: mean entries a KV head and layer.
        seen: tokens read by the end of this turn.
        layers: the cache before this turn; what a layer cannot fill of its budget, because
            earlier turns dropped more, goes to others that can.
        new: tokens read in this turn, if not all that were seen.

    Raises:
        SettingError: the method does not work on a model with sliding windows, or drops entries
            one by one that are quantized together.
    """
    cut = shape.full_layers
    new = seen if new is None else new
    budgets = method.layer_budgets(len(cut), average, seen) if cut else []
    pruning = method.prefilling.pruning if seen > average else None
    token_budgets = pruning.token_budgets(shape.layers, new, seen) if pruning else None
    if layers is not None and seen > average and method.across.sharing is None:
        given = token_budgets or [new] * shape.layers
        held = [_entries(layers[layer]) + given[layer] for layer in cut]
        budgets = filled(budgets, held)
    by_layer = dict(zip(cut, budgets, strict=True))
    candidate_budget = PROVISION * average if method.across.sharing and seen > average else None
    merging = method.across.merging
    pairs = merging.pairs(shape.windows) if merging else []
    partners = dict(pairs) | {upper: lower for lower, upper in pairs}
    policies = [
        LayerPolicy(
            method.for_layer(layer, shape.layers),
            by_layer[layer],
            candidate_budget=candidate_budget,
            partner=partners.get(layer),
            bits=bits,
        )
        if window is None
        else _of_window(window, bits)
        for layer, window in enumerate(shape.windows)
    ]
    if bits is not None:
        _require_codes(bits, shape)
        require_growing(bits, method, windows=any(shape.windows))
    if token_budgets is None:
        return policies
    if len(cut) < shape.layers or shape.recurrent_layers:
        what = "recurrent layers" if shape.recurrent_layers else "sliding windows"
        raise SettingError(
            f"{method.name} leaves tokens behind between layers, which this {shape.model_type} "
            f"model's {what} do not allow: choose another method (kvlite methods)"
        )
    return [
        replace(policy, token_budget=token_budget)
        for policy, token_budget in zip(policies, token_budgets, strict=True)
    ]


def _of_window(window: LocalWindow, bits: KVBits | None) -> LayerPolicy:
    """A layer that does not see everything; a chunk is dropped once it is full."""
    if window.chunked:
        return LayerPolicy(Aligned(), window.size - 1, window, bits=bits)
    return LayerPolicy(Streaming(sinks=0), window.size, window, bits=bits)


def _require_codes(bits: KVBits, shape: ModelShape) -> None:
    """Raises SettingError if the codes of an entry do not fill whole bytes."""
    codes = 8 // min(bits.keys, bits.values)
    if odd := [size.dim for size in shape.kv_sizes if size.dim % codes]:
        raise SettingError(
            f"--kv-bits {bits} needs heads whose dimension is a multiple of {codes}, and this "
            f"model's have {odd[0]}: use --kv-bits 8"
        )
    if larger := [size.dim for size in shape.kv_sizes if not bits.saves(size)]:
        raise SettingError(
            f"--kv-bits {bits} would take more memory than 16 bits, as heads of this model have "
            f"{larger[0]} channels, of which groups of {bits.group} leave single ones with a scale "
            "each: use --kv-bits 16"
        )


def require_growing(bits: KVBits | None, method: Method, windows: bool = False) -> None:
    """Raises SettingError if entries that are quantized together would be dropped one by one while
    answering, by the method or by the model's sliding `windows`."""
    if bits is None or bits.together == 1 or (method.decoding.append_only and not windows):
        return
    what = method.spec if not method.decoding.append_only else "this model's sliding windows"
    raise SettingError(
        f"--kv-bits {bits} holds the keys of neighboring entries together, which {what} would "
        "drop one by one: use --kv-bits 4, or a method that only adds while answering"
    )


def require_in_sight(method: Method, recall: str) -> None:
    """Raises SettingError if the setting `recall` asks for entries that the method would never look
    at; `auto` does without."""
    if recall not in ("auto", "off") and method.prefilling.mask is not None:
        raise SettingError(
            f"{method.spec} masks attention to what it drops, so --recall {recall} has nothing "
            "to bring back: use --recall off"
        )


def require_apart(policies: Sequence[LayerPolicy], layers: Sequence[LayerCache]) -> None:
    """Raises SettingError if a policy chooses entries of single heads where heads share keys."""
    for policy, layer in zip(policies, layers, strict=True):
        if layer.shares_keys and policy.method.compresses and not policy.method.needs.first:
            raise SettingError(
                f"heads of this conversation share keys (chai), and {policy.method.spec} drops "
                "entries of single heads: start a new conversation, or keep its method"
            )


def merge_below(
    layers: list[LayerCache], policies: Sequence[LayerPolicy], index: int, room: int
) -> None:
    """Replace a layer and the one below by their merged form, if they are a pair and their method
    merges them now; lines then have `room` to grow."""
    policy = policies[index]
    below = policy.partner
    if below is None or below > index or policy.keeps_all(policy.counted(layers[index])):
        return
    merging = policy.method.across.merging
    assert merging is not None, "only layers of a method that merges have partners"
    segments = merging.merge(layers[below].head_groups, layers[index].head_groups, policy.bits)
    if segments:
        lower, upper = zip(*segments, strict=True)
        merged = layers[below].behind(lower, room), layers[index].behind(upper, room)
        layers[below], layers[index] = merged


def share_out(
    layers: list[LayerCache],
    policies: list[LayerPolicy],
    room: int,
    backend: ScoringBackend = ON_DEVICE,
) -> None:
    """`shares` and `take_share` in one."""
    for index, selections in shares(layers, policies, backend):
        take_share(layers, policies, index, selections, room)


def shares(
    layers: Sequence[LayerCache],
    policies: Sequence[LayerPolicy],
    backend: ScoringBackend = ON_DEVICE,
) -> list[tuple[int, list[Selection]]]:
    """What the layers that were provided with more than their budget keep once all are read, by
    index. Scores are compared at `backend`."""
    waiting = [
        index for index, policy in enumerate(policies) if policy.candidate_budget is not None
    ]
    if not waiting:
        return []
    policy = policies[waiting[0]]
    sharing = policy.method.across.sharing
    assert sharing is not None, "only layers of a method that shares have a candidate_budget"
    backend = _backend(policy.method, backend)
    with backend.timed():
        shared = sharing([layers[index] for index in waiting], policy.budget)
        brought = [_brought(each, backend) for each in shared]
    return list(zip(waiting, brought, strict=True))


def take_share(
    layers: list[LayerCache],
    policies: list[LayerPolicy],
    index: int,
    selections: Sequence[Selection],
    room: int,
) -> None:
    """Cut one layer to its share, with `room` to grow; its policy gets the share as budget."""
    from kvlite.cache import LayerCache

    lengths = [each.length for each in selections]
    entries, heads = (sum(h * n for h, n in lengths), sum(h for h, _ in lengths))
    policy = replace(policies[index], candidate_budget=None, budget=ceil(entries / heads))
    sizes = policy.capacities(lengths, room)
    rows, bits = policy.method.decoding.rows, policy.quantize_now
    layers[index] = LayerCache.gathered(selections, sizes, rows, bits=bits)
    policies[index] = policy


def _backend(method: Method, backend: ScoringBackend) -> ScoringBackend:
    """Where a method's scores are compared: on the device, unless they are attention."""
    return backend if method.needs.attention else ON_DEVICE


def _brought(selections: Sequence[Selection], backend: ScoringBackend) -> list[Selection]:
    """The same, with their slots on the device."""
    return [replace(each, slots=backend.slots(each.slots)) for each in selections]


def _entries(layer: LayerCache) -> int:
    """Mean entries of the heads that hold any."""
    heads = sum(count for count, _ in layer.lengths)
    return sum(count * entries for count, entries in layer.lengths) // heads
