"""Data kept off the device: the host KV store, scores, weights."""

from kvlite.offload.host_scoring import HostScores, host_scoring_backend
from kvlite.offload.kv.recall import Recall
from kvlite.offload.kv.store import HostKVStore
from kvlite.offload.weights.layers import StreamedLayers

__all__ = ["HostKVStore", "HostScores", "Recall", "StreamedLayers", "host_scoring_backend"]
