"""What does not stay on the device."""

from kvlite.offload.recall import Recall
from kvlite.offload.tier import Tier

__all__ = ["Recall", "Tier"]
