"""What does not stay on the device."""

from kvlite.offload.recall import Recall
from kvlite.offload.scores import HostScores, host_desk
from kvlite.offload.tier import Tier
from kvlite.offload.weights import StreamedLayers

__all__ = ["HostScores", "Recall", "StreamedLayers", "Tier", "host_desk"]
