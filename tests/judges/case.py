"""What a case of the judges is, and the sizes that most share: nobody's defaults, all different."""

from dataclasses import dataclass, field
from typing import Any

from tests.judges.vocabulary import BOS, EOS, PAD, SIZE

Config = dict[str, Any]

SIZES: Config = {
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "vocab_size": SIZE,
    "max_position_embeddings": 3072,
    "rms_norm_eps": 3e-4,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
# Those of models that llama.cpp knows by how many layers they have.
DEEP: Config = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24}

WINDOW: Config = {"sliding_window": 56}
ROUTED: Config = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 96}
WINDOW_LOST = "the converter stores no window"


@dataclass(frozen=True, eq=False)
class Case:
    """A tiny model of one architecture.

    Attributes:
        name: that of its files.
        kind: transformers' `model_type`.
        special: what is special about it, for the table.
        config: of transformers, over `SIZES`; None takes a size out.
        saved: what `config.json` says otherwise for the converter; None takes a key out. Configs
            that transformers 5 saves lack keys of those that were published.
        lost: what the file no longer says: transformers' config for the expectation.
        reason: why something is lost, or why llama.cpp is no judge.
        llama_cpp: whether it "agrees"; or it "differs" or "refuses", with the reason above.
        refused: what kvlite says of a model that it does not run.
        tolerance: of log-probabilities, kvlite's from llama.cpp's.
        rounding: the same, from transformers'.
        architecture: the class that the converter is told, if it isn't the model's.
        pre: the pre-tokenizer that the file names.
        extra_layers: layers for multi-token prediction, which transformers has no class for.
        options: of the converter.
        sharper: how much more attention looks at few tokens than in most; less where it is not
            scaled, or where many layers would amplify what llama.cpp rounds.
        seed: the first whose answer is clear, for speed.
    """

    name: str
    kind: str
    special: str
    config: Config = field(default_factory=dict)
    saved: Config = field(default_factory=dict)
    lost: Config = field(default_factory=dict)
    reason: str = ""
    llama_cpp: str = "agrees"
    refused: str = ""
    tolerance: float = 1e-3
    architecture: str | None = None
    pre: str = "qwen2"
    extra_layers: int = 0
    options: tuple[str, ...] = ()
    rounding: float = 1e-3
    sharper: float = 0.0
    seed: int = 0

    @property
    def makes(self) -> tuple[object, ...]:
        """What its files depend on."""
        told = (self.name, self.kind, self.sizes, self.saved, self.lost, self.architecture)
        return (
            *told,
            self.pre,
            self.extra_layers,
            self.options,
            self.rounding,
            self.sharper,
            self.seed,
        )

    @property
    def sizes(self) -> Config:
        """The config that the model is made with."""
        made = {**SIZES, **self.config}
        return {key: value for key, value in made.items() if value is not REMOVED}


class _Removed:
    def __repr__(self) -> str:
        return "REMOVED"


REMOVED = _Removed()


def rope(kind: str = "default", theta: float = 25_000.0, **others: Any) -> Config:
    """`rope_parameters`."""
    return {"rope_type": kind, "rope_theta": theta, **others}


def yarn(factor: float = 5.0, theta: float = 25_000.0, **others: Any) -> Config:
    """`rope_parameters` of YaRN, over 192 tokens."""
    return rope("yarn", theta, factor=factor, original_max_position_embeddings=192, **others)


def llama3(factor: float = 6.0, theta: float = 30_000.0) -> Config:
    """`rope_parameters` of Llama 3.1, over 192 tokens."""
    return rope(
        "llama3",
        theta,
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=192,
    )
