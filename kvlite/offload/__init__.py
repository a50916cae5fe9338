"""What does not stay on the device."""

from kvlite.offload.tier import Tier

__all__ = ["Tier"]
