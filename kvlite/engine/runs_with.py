"""What runs with what: one table, from which reasons, docs/architecture.md and tests come.

A decode step can be captured as a CUDA graph, take proposed tokens along (speculation), or both.
Each does without some traits of a model and of the layers of a cache; where one has such a trait,
plain steps run, and metrics give the reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvlite.cache import KVCache, LayerCache
from kvlite.engine.implementations import lacking
from kvlite.methods.layer_policy import LayerPolicy
from kvlite.model.architectures import has_experts
from kvlite.model.experts import experts_of, reads_in_place
from kvlite.model.load import LoadedModel
from kvlite.model.rotary import fixed_tables
from kvlite.model.weights import MXFP4
from kvlite.offload import Recall
from kvlite.offload.kv.recall_program import recall_refusal

Way = Literal["graph", "speculation", "graph of proposed tokens"]
WAYS: tuple[Way, ...] = ("graph", "speculation", "graph of proposed tokens")
BOTH = WAYS[2]


@dataclass(frozen=True)
class LayerInStep:
    """A layer of a cache, before a step."""

    index: int
    layer: LayerCache
    policy: LayerPolicy
    recall: Recall | None


@dataclass(frozen=True)
class Trait:
    """Something that one or both ways cannot do.

    Attributes:
        name: what it is, for the docs.
        reason: why a step has it, in a few words, by a model or a layer; "" if it has not.
        without: the ways that do without it; what either does without, a graph of proposed tokens
            does, too.
    """

    name: str
    without: tuple[Way, ...]
    of_model: Callable[[LoadedModel, Recall | None], str] = lambda model, recall: ""
    of_layer: Callable[[LayerInStep], str] = lambda layer: ""

    def stops(self, way: Way) -> bool:
        """Whether a step that has it cannot go this way."""
        return way in self.without or way == BOTH


def _waits(model: LoadedModel, recall: Recall | None) -> str:
    waits = model.weights.stored or model.weights.name == "int8"
    if waits and model.weights.name not in ("nf4", MXFP4):
        return f"products with {model.weights.name} weights may wait for the host"
    on_cuda = model.device.type == "cuda" and has_experts(model.shape.model_type)
    if on_cuda and not all(map(reads_in_place, experts_of(model.module))):
        return "experts are unpacked as a token chooses them"
    return ""


def _without_triton(model: LoadedModel, recall: Recall | None) -> str:
    return "triton is not installed" if lacking(model.device) == "triton" else ""


def _grows(each: LayerInStep) -> str:
    groups, policy = each.layer.head_groups, each.policy
    rooms = [group.room for group in groups]
    if any(rooms) and policy.mask is not None:
        return "a layer is not full yet"
    sizes = policy.capacities(each.layer.lengths)
    every = zip(rooms, sizes, (group.capacity for group in groups), strict=True)
    if any(not room and size > capacity for room, size, capacity in every):
        return "a layer has to grow"
    return ""


def _trims(each: LayerInStep) -> str:
    method, longest = each.policy.method, max(used for _, used in each.layer.lengths)
    full = method.decoding.trim is not None and longest >= each.policy.budget
    return f"{method.name} evicts entries of a full layer" if full else ""


TRAITS = (
    Trait("no Triton on CUDA", ("graph",), _without_triton),
    Trait(
        "weights that are streamed",
        ("graph",),
        lambda model, _: "" if model.layers.passing is None else "weights are streamed",
    ),
    Trait(
        "layers on several cards",
        ("graph",),
        lambda model, _: "layers are on several cards" if model.cards else "",
    ),
    Trait("weights whose products wait for the host: int8, experts on demand", ("graph",), _waits),
    Trait(
        "rotations that change with the length",
        ("graph",),
        lambda model, _: (
            "" if fixed_tables(model) else "the model's rotations change with the length"
        ),
    ),
    Trait(
        "recall in a model whose layers attend to entries of others (Gemma 3n, 4)",
        ("speculation",),
        lambda model, recall: (
            "layers attend to what others recall"
            if recall is not None and model.shape.lenders
            else ""
        ),
    ),
    Trait(
        "recall from a quantized host store",
        ("speculation",),
        lambda model, recall: (
            "what a rejected token recalled would come back rounded"
            if recall is not None and recall.store.bits is not None
            else ""
        ),
    ),
    Trait("chunked windows that are full (Llama 4)", ("graph",), of_layer=_trims),
    Trait(
        "heads that share keys (CHAI)",
        ("graph",),
        of_layer=lambda each: "heads share keys" if each.layer.shares_keys else "",
    ),
    Trait(
        "a method that decides after the first step (SimLayerKV:decode), until then",
        ("graph", "speculation"),
        of_layer=lambda each: (
            f"{each.policy.method.name} chooses a method for each layer"
            if each.policy.method.across.resolves_at == "step"
            else ""
        ),
    ),
    Trait(
        "recall from memory that the GPU does not read, or of little text",
        ("graph",),
        of_layer=lambda each: (
            "" if each.recall is None else recall_refusal(each.recall, each.index, each.layer)
        ),
    ),
    Trait(
        "a method that remembers attention (H2O, TOVA, UNComp)",
        ("speculation",),
        of_layer=lambda each: (
            f"{each.policy.method.name} remembers each token's attention"
            if each.policy.remembers(each.layer)
            else ""
        ),
    ),
    Trait(
        "a mask (LM-Infinite, KV-X)",
        ("speculation",),
        of_layer=lambda each: (
            "a mask moves with each token" if each.policy.mask is not None else ""
        ),
    ),
    Trait(
        "full layers that evict with each token (StreamingLLM, sliding windows)",
        ("speculation",),
        of_layer=lambda each: (
            "a full layer evicts with each token"
            if each.policy.method.decoding.bounded
            and not all(group.room for group in each.layer.head_groups)
            else ""
        ),
    ),
    Trait("a layer that a mask has not filled, or that has to grow", ("graph",), of_layer=_grows),
    Trait(
        "recall",
        (BOTH,),
        lambda model, recall: "" if recall is None else "each token recalls for itself",
    ),
    Trait(
        "recurrent layers",
        (BOTH,),
        lambda model, _: (
            "a recurrent layer takes one token after the other" if any(model.shape.states) else ""
        ),
    ),
)


def reason_against(
    way: Way,
    model: LoadedModel,
    cache: KVCache,
    policies: Sequence[LayerPolicy],
    recall: Recall | None,
) -> str:
    """Why the next step of a conversation cannot go this way, in a few words; "" if it can."""
    traits = [trait for trait in TRAITS if trait.stops(way)]
    for trait in traits:
        if reason := trait.of_model(model, recall):
            return reason
    for index, (layer, policy) in enumerate(zip(cache.layers, policies, strict=True)):
        each = LayerInStep(index, layer, policy, recall)
        for trait in traits:
            if reason := trait.of_layer(each):
                return reason
    return ""


def as_table() -> str:
    """The table as Markdown, for the docs."""
    rows = ["| with | " + " | ".join(WAYS) + " |", "|---" * (1 + len(WAYS)) + "|"]
    for trait in TRAITS:
        runs = ("no" if trait.stops(way) else "yes" for way in WAYS)
        rows.append(f"| {trait.name} | " + " | ".join(runs) + " |")
    return "\n".join(rows)
