"""Bytes of weights: on the device, in transfer, and used per token."""

from dataclasses import dataclass, replace
from math import ceil

from kvlite.model.shape import GROUPS, ModelShape, Parts
from kvlite.model.weights import PLAIN, Weights
from kvlite.offload.weights.experts import LEAST, Resident


@dataclass(frozen=True)
class HeldWeights:
    """The bytes of one model's weights.

    Attributes:
        in_files: bytes of the model's files; a quantized checkpoint takes as many in memory.
        on_cpu: whether the device is a CPU.
        by_layer: whether layers are read one by one, as for several cards.
    """

    shape: ModelShape
    in_files: int
    on_cpu: bool
    by_layer: bool = False

    def on_device(
        self, weights: Weights, stream: str, resident: Resident = LEAST
    ) -> dict[str, int]:
        """Bytes on the device by group, while the model runs."""
        shape, packed = self.shape, weights.keeps_experts_packed(self.shape.model_type)
        if weights.stored and self.in_files and not packed:
            return dict.fromkeys(GROUPS, 0) | {"mlp": self.in_files}
        kind = Weights("nf4", weights.dtype) if weights.stored and not packed else weights
        sizes = shape.weight_bytes(kind)
        if stream == "off":
            return sizes
        buffers = 1.0 if resident.layers else min(2, shape.layers) / shape.layers
        sizes["mlp"] -= self.experts * self._expert_bytes(kind)
        held = {
            group: size if group in ("embedding", "head") else int(size * buffers)
            for group, size in sizes.items()
        }
        held["mlp"] += self.slots(resident) * self._expert_bytes(kind)
        return held

    @property
    def experts(self) -> int:
        """The number of experts in all layers."""
        return self._per_layer * self._with_experts

    def slots(self, resident: Resident) -> int:
        """The number of experts on the device."""
        return max(resident.experts, min(2, self._with_experts) * self._per_layer)

    def filling(self, weights: Weights, spare: int) -> Resident:
        """What may be on the device in so many bytes more than the least: first what every token
        goes through, then experts."""
        if not self.experts:
            return LEAST
        least, whole = (
            sum(self.on_device(weights, "ram", each).values())
            for each in (LEAST, Resident(layers=True))
        )
        layers = whole - least <= spare
        spare -= (whole - least) * layers
        more = spare // self._expert_bytes(weights)
        return Resident(min(self.slots(LEAST) + more, self.experts), layers)

    def for_a_token(self, weights: Weights) -> int:
        """Bytes that a token uses; of the experts, only those that it is routed to."""
        held = sum(self.on_device(weights, "off").values())
        return held - self.experts * self._expert_bytes(weights) + self._chosen_bytes(weights)

    def brought(self, weights: Weights, resident: Resident) -> int:
        """Bytes of streamed weights that a token loads, if routing is even."""
        missing = 1 - self.slots(resident) / self.experts if self.experts else 0
        experts = int(missing * self._chosen_bytes(weights))
        if resident.layers:
            return experts
        sizes = self.shape.weight_bytes(weights)
        layers = sum(sizes.values()) - sizes["embedding"] - sizes["head"]
        return layers - self.experts * self._expert_bytes(weights) + experts

    def passing(self, weights: Weights) -> int:
        """Bytes of the weight that exists twice while it is quantized, or laid out for a CPU; of a
        whole layer if layers are read one by one."""
        if not self.on_cpu and (weights.name in PLAIN or weights.index is not None):
            return 0
        if self.by_layer or weights.keeps_experts_packed(self.shape.model_type):
            read = weights if weights.stored else replace(weights, name="bf16")  # of its dtype
            return self._largest_layer(read)
        if weights.index is not None:
            return weights.index.largest
        largest = max(part.numbers() // part.count for part in self.shape.parts)
        return largest * weights.dtype.itemsize

    def _largest_layer(self, weights: Weights) -> int:
        """Bytes of a layer of the model, of which only some may have attention."""
        shape = self.shape
        sizes = shape.weight_bytes(weights)
        mixers = [sizes["attention"] / shape.layers]
        if shape.recurrent_layers:
            mixers.append(sizes["recurrent"] / shape.recurrent_layers)
        every = max(shape.layers, sum(map(len, shape.layer_groups)))
        own = sum(part.nbytes(weights) / part.count for part in self._parts)
        rest = sizes["mlp"] - sum(part.nbytes(weights) for part in self._parts) + sizes["norms"]
        return ceil(max(mixers) + own + rest / every)

    @property
    def _parts(self) -> list[Parts]:
        return [part for part in self.shape.parts if part.experts]

    @property
    def _with_experts(self) -> int:
        """Layers that have any."""
        return self._parts[0].count if self._parts else 0

    @property
    def _per_layer(self) -> int:
        return self._parts[0].size[0] if self._parts else 0

    def _expert_bytes(self, weights: Weights) -> int:
        """Bytes of one expert."""
        return sum(part.nbytes(weights) // part.count // part.size[0] for part in self._parts)

    def _chosen_bytes(self, weights: Weights) -> int:
        """Bytes of the experts that a token is routed to, in all layers."""
        return self._with_experts * self.shape.chosen_experts * self._expert_bytes(weights)
