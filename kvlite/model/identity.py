"""Which model a saved conversation was made with, and whether another may continue it."""

import hashlib
import json
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlite.errors import SnapshotError
from kvlite.model.files import fingerprint

if TYPE_CHECKING:
    from kvlite.model.load import LoadedModel

# The embedded model as 0.1.0 had it, converted to safetensors, and as the file that it is.
_EARLIER = {"a02ad3db0b00a393": "d4d495c14aac8e52"}
_SIZES = "model_type layers heads kv_heads head_dim hidden vocab window_sizes"


@dataclass(frozen=True)
class Identity:
    """Everything that keys and values depend on.

    Attributes:
        fingerprint: of the weight files.
        config: digest of sizes, windows and rotations.
        weights, dtype: the types of the loaded weights, however they are packed, and of the cache.
        tokenizer: digest of the vocabulary.
        template: digest of the chat template.
    """

    fingerprint: str
    config: str
    weights: str
    dtype: str
    tokenizer: str
    template: str

    def __post_init__(self) -> None:
        known = _EARLIER.get(self.fingerprint, self.fingerprint)
        object.__setattr__(self, "fingerprint", known)

    @classmethod
    def of(cls, model: "LoadedModel") -> "Identity":
        """The identity of a loaded model. Raises ModelError if a weight file is damaged."""
        shape, config = model.shape, model.module.config
        sizes = [getattr(shape, name) for name in _SIZES.split()]
        rotations = getattr(config, "rope_parameters", None) or {}
        return cls(
            fingerprint=fingerprint(model.path),
            config=_digest([*sizes, rotations]),
            weights=model.weights.numbers,
            dtype=str(model.dtype).removeprefix("torch."),
            tokenizer=_vocabulary(model.tokenizer.get_vocab()),
            template=_digest(model.tokenizer.chat_template),
        )

    def require(self, other: "Identity", path: object, name: str) -> None:
        """Raises SnapshotError if what this model made, at `path`, cannot be used with another;
        `name` is this model's for users."""
        if (self.fingerprint, self.config) != (other.fingerprint, other.config):
            raise SnapshotError(
                f"{path} was made with another model, {name}: open it with --model {name}"
            )
        if (self.weights, self.dtype) != (other.weights, other.dtype):
            raise SnapshotError(
                f"{path} was made with {self.weights} weights in {self.dtype}, and these are "
                f"{other.weights} in {other.dtype}: open it with --weights {self.weights}"
            )
        if (self.tokenizer, self.template) != (other.tokenizer, other.template):
            what = "tokenizer" if self.tokenizer != other.tokenizer else "chat template"
            raise SnapshotError(
                f"{path} was made with another {what} of {name}: put the model's own files back, "
                "or make it again"
            )


def _vocabulary(vocab: dict[str, int]) -> str:
    tokens = sorted(vocab, key=vocab.__getitem__)
    digest = hashlib.sha256("\0".join(tokens).encode("utf-8", "surrogatepass"))
    digest.update(array("q", sorted(vocab.values())).tobytes())
    return digest.hexdigest()[:16]


def _digest(plain: Any) -> str:
    text = json.dumps(plain, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
