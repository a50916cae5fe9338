"""What does not stay on the device."""

from kvlite.offload.host_scoring import HostScores, host_desk
from kvlite.offload.kv.recall import Recall
from kvlite.offload.kv.store import Tier
from kvlite.offload.weights.layers import StreamedLayers

__all__ = ["HostScores", "Recall", "StreamedLayers", "Tier", "host_desk"]
