"""KeyDiff: keys unlike the others, chosen without any query."""

from dataclasses import dataclass

from kvlite.methods.capabilities import Needs
from kvlite.methods.scored import Scored
from kvlite.methods.scores import Window
from kvlite.methods.types import KVHeadGroup, Tensor


@dataclass(frozen=True)
class KeyDiff(Scored):
    """Keeps the keys that point away from the mean direction of all keys of their head.

    The paper evicts block by block while reading. Here all of a layer's keys are present when it
    is cut, so they are scored once, together. The last token always stays; the paper leaves it to
    its score.
    """

    name = "keydiff"
    summary = "keeps the keys least like the others; needs no attention"
    paper = (
        "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in "
        "Resource-Constrained Environments, section 3"
    )

    needs = Needs()
    window = 1

    def score(self, head_group: KVHeadGroup, window: Window) -> Tensor:
        """Cosine distance from the mean of all keys' directions."""
        import torch.nn.functional as F

        directions = F.normalize(head_group.keys[:, :, : head_group.used].float(), dim=-1)
        return 1 - F.cosine_similarity(directions, directions.mean(2, keepdim=True), dim=-1)
