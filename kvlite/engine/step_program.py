"""A decode step as one program: what changes from token to token is on the device.

The token, its position and the slots it is written to are tensors, and the next token is drawn
there, so that the same launches serve every token, and a CUDA graph can replay them. What the host
has to decide happens between programs, in `decode.Step`: more room, methods that settle or trim,
what is quantized, masked or recalled.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from kvlite.cache import KVCache, KVHeadGroup, LayerCache
from kvlite.engine.sampling import Sampler
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.model.load import LoadedModel
from kvlite.model.rotary import fixed_tables
from kvlite.offload import Recall
from kvlite.ops.attention import attend_ragged, attend_with_rows, grouped
from kvlite.ops.softmax import Softmax


def refusal(
    model: LoadedModel, cache: KVCache, policies: list[LayerPolicy], recall: Recall | None
) -> str | None:
    """Why the next step of a cache is no program, in a few words; None if it is one."""
    if recall is not None:
        return "recall looks for entries at every token"
    if model.shape.recurrent_layers:
        return "recurrent layers carry a state from token to token"
    if model.device.type == "cuda" and find_spec("triton") is None:
        return "triton is not installed"
    if model.layers.passing is not None:
        return "weights are streamed"
    if model.weights.name != "nf4" and (model.weights.stored or model.weights.name == "int8"):
        return f"products with {model.weights.name} weights may wait for the host"
    if model.weights.keeps_experts_packed(model.shape.model_type):
        return "experts are unpacked as a token chooses them"
    if not fixed_tables(model):
        return "the model's rotations change with the length"
    return next(
        (
            reason
            for layer, policy in zip(cache.layers, policies, strict=True)
            if (reason := _layer_refusal(layer, policy))
        ),
        None,
    )


def _layer_refusal(layer: LayerCache, policy: LayerPolicy) -> str | None:
    method, rooms = policy.method, [head_group.room for head_group in layer.head_groups]
    if policy.bits is not None or layer.packed or layer.computed:
        return "the cache is quantized or merged"
    if policy.mask is not None:
        return f"{method.name} attends under a mask"
    if method.decoding.trim is not None:
        return f"{method.name} trims a layer that has grown too long"
    if method.across.resolves_at == "step":
        return f"{method.name} chooses a method for each layer"
    if any(rooms):
        waits = not all(rooms) or policy.remembers(layer)
        return "a layer is not full yet" if waits else None
    capacities = [head_group.capacity for head_group in layer.head_groups]
    wanted = policy.capacities(layer.lengths)
    if any(size > capacity for size, capacity in zip(wanted, capacities, strict=True)):
        return "a layer has to grow"
    return f"{method.name} compares heads" if method.decoding.host_position else None


class LayerProgram:
    """One layer of a program; a token is appended to all of its head groups or, if they are full,
    overwrites an entry in each.

    Attributes:
        layer: whose storage it writes to.
        evicts: whether it is full, so that each token overwrites an entry.
        writes: whether tokens are written; else they are only attended with.
    """

    def __init__(self, layer: LayerCache, policy: LayerPolicy, position: Tensor, seen: int) -> None:
        self.layer, self.policy, self.position = layer, policy, position
        self.writes = True
        groups, device = layer.head_groups, position.device
        self.heads = heads = [head for group in groups for head in group.heads]
        capacities = [group.capacity for group in groups for _ in group.heads]
        used = [group.used for group in groups for _ in group.heads]
        starts = [sum(capacities[:index]) for index in range(len(heads))]
        self.longest = max(capacities)
        self.evicts = not groups[0].room
        self.remembers = self.evicts and policy.remembers(layer)

        def on_device(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, device=device)

        self.starts = on_device(starts)
        # Where the token at position 0 would have been appended.
        self.first = on_device([at + n - seen for at, n in zip(starts, used, strict=True)])
        self.ends = on_device([at + n - 1 for at, n in zip(starts, capacities, strict=True)])
        self.oldest_row = groups[0].history_index + 1 - seen
        # Storage has heads in an order of its own, and those with an alias not at all.
        every = len(heads) + len(layer.head_alias)
        self.order = None if heads == list(range(every)) else on_device(heads)
        taken = [heads.index(layer.head_alias.get(head, head)) for head in range(every)]
        self.back = None if self.order is None else on_device(taken)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """As `model.attention_interface.Attender`, for one token of one sequence."""
        queries = grouped(q, k.shape[1])[:, :, :, 0]
        if self.order is not None:
            softmax = softmax.of_heads(self.heads, k.shape[1])
            queries, k, v = (each.index_select(1, self.order) for each in (queries, k, v))
        slots = self._evicted() if self.evicts else self.first + self.position
        if self.writes:
            self._write(slots, k[:, :, 0], v[:, :, 0])
        if self.remembers:
            out = self._remembering(queries, softmax)
        else:
            keys, values = self.layer.keys, self.layer.values
            last = self.ends if self.evicts else slots
            runs = self.starts, last, self.longest
            out = attend_ragged(queries, keys, values, *runs, softmax)
        if self.back is not None:
            out = out.index_select(1, self.back)
        return out.flatten(1, 2)[:, :, None]

    def _evicted(self) -> Tensor:
        """The slots of the entries that the token overwrites, one a KV head."""
        evict, budget = self.policy.method.decoding.evict, self.policy.budget
        assert evict is not None
        each = [evict(group, budget, self.position)[0] for group in self.layer.head_groups]
        return self.starts + torch.cat(each)

    def _write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        layer = self.layer
        layer.keys.index_copy_(1, slots, keys)
        layer.values.index_copy_(1, slots, values)
        layer.positions.index_copy_(1, slots, self.position.int().expand(1, len(slots)))
        if self.evicts and layer.rows:
            for group, own in zip(
                layer.head_groups, self._by_group(slots - self.starts), strict=True
            ):
                assert group.rows is not None
                gone = own[None, :, None, None].expand(-1, -1, layer.rows, -1)
                group.rows.scatter_(3, gone, 0.0)

    def _remembering(self, queries: Tensor, softmax: Softmax) -> Tensor:
        """Attention over full head groups, which remember it."""
        outs, first = [], 0
        for group, own in zip(self.layer.head_groups, self._by_group(queries, 1), strict=True):
            heads = range(first, first := first + len(group.heads))
            q = own.flatten(1, 2)[:, :, None]
            keys, values = group.residual_keys, group.residual_values
            own_softmax = softmax.of_heads(heads, len(self.heads))
            out, row = attend_with_rows(q, keys, values, own_softmax)
            outs.append(grouped(out, own.shape[1])[:, :, :, 0])
            if self.writes:
                self._remember(group, row)
        return torch.cat(outs, 1)

    def _remember(self, group: KVHeadGroup, row: Tensor) -> None:
        """Add an attention row, `(batch, heads, 1, capacity)`, to what a head group remembers."""
        assert group.rows is not None
        if self.policy.method.decoding.cumulative:
            group.rows.add_(row)
        else:
            newest = (self.position + self.oldest_row) % group.rows.shape[2]
            group.rows.index_copy_(2, newest, row)

    def _by_group(self, each: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        """Rows of KV heads, in the order of the storage, by head group."""
        return torch.split(each, [len(group.heads) for group in self.layer.head_groups], dim)

    def advance(self) -> None:
        """Count a token that was written."""
        for group in self.layer.head_groups:
            if not self.evicts:
                group.used += 1
            elif self.remembers and not self.policy.method.decoding.cumulative:
                assert group.rows is not None
                group.history_index = (group.history_index + 1) % group.rows.shape[2]


class StepProgram:
    """One token's way through all layers to the next token, for as many tokens as the cache's
    storage serves.

    Attributes:
        token, position: `(1,)` int64, of the token that goes through; a run leaves those of the
            next one.
        sampler: draws it.
        context: `(1, n)` int64, all tokens before it, if the sampler looks at them.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        policies: list[LayerPolicy],
        sampler: Sampler,
        seen: list[int],
    ) -> None:
        """For a cache of one sequence that `refusal` has no reason against, of the tokens
        `seen`."""
        self.model, self.cache, self.policies = model, cache, [*policies]
        self.modules, self.sampler = model.layers, sampler
        self.token = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.position = torch.full_like(self.token, cache.seen)
        self.layers = [
            LayerProgram(layer, policy, self.position, cache.seen)
            for layer, policy in zip(cache.layers, policies, strict=True)
        ]
        # A token that is there twice is penalized once.
        known = [*seen, *seen[:1] * self.room] if sampler.penalized else []
        self.context = torch.tensor([known], dtype=torch.int64, device=model.device)
        self.before = cache.seen - len(seen)

    @property
    def appends(self) -> bool:
        """Whether a run changes nothing that was there, so that it need not count."""
        return not any(layer.evicts for layer in self.layers)

    @property
    def room(self) -> int:
        """Tokens that can still go through."""
        appending = (layer.layer.head_groups for layer in self.layers if not layer.evicts)
        rooms = [group.room for groups in appending for group in groups]
        return min(rooms, default=self.model.shape.max_context)

    def serves(self, cache: KVCache, policies: list[LayerPolicy]) -> bool:
        """Whether the next token of a cache can go through it. Others may have been appended in
        the meantime, or taken back."""
        return (
            cache is self.cache
            and self.model.layers is self.modules
            and all(
                own.layer is layer for own, layer in zip(self.layers, cache.layers, strict=True)
            )
            and all(own is policy for own, policy in zip(self.policies, policies, strict=True))
            and self.room > 0
        )

    def run(self) -> Tensor:
        """Put the token through the model: logits of the next one, `(1, vocab)` float32, which is
        drawn from them."""
        hidden = self.model.embed(self.token[:, None])
        rotations = self.model.rotations_at(self.position, self.model.dtype)
        for index, (rotation, layer) in enumerate(zip(rotations, self.layers, strict=True)):
            module = self.model.step_layer(index)
            hidden = module(hidden, position_embeddings=rotation, kvlite=layer)
        logits = self.model.logits(hidden[:, -1])
        if self.sampler.penalized:
            self.context.index_copy_(1, self.position - self.before, self.token[None])
        self.token.copy_(self.sampler.draw(logits, self.context))
        self.position.add_(1)
        return logits

    def rehearse(self) -> None:
        """Do all that `run` does but write to the cache, so that what is set up at first use is."""
        generator = self.sampler.generator
        drawn = generator.get_state()
        for layer in self.layers:
            layer.writes = False
        try:
            self.run()
        finally:
            generator.set_state(drawn)
            for layer in self.layers:
                layer.writes = True

    def begin(self, token: int, seen: list[int]) -> None:
        """Let a token go through next, after those `seen`."""
        self.token.fill_(token)
        self.position.fill_(self.cache.seen)
        if self.sampler.penalized:
            self.context[0, : len(seen)] = torch.tensor(seen)

    def end(self) -> None:
        """Count the token that went through."""
        for layer in self.layers:
            layer.advance()
        self.cache.seen += 1
        self.cache.writing = False
