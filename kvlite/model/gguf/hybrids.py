"""What is particular in the configs of hybrids: models whose layers are not all of attention. Each
function gives the keys of a config that are its own.

Source: as of `model.gguf.families`.
"""

from kvlite.model.gguf.families import (
    FULL,
    RECURRENT,
    SHARED_WIDTH,
    Config,
    routed_experts,
)
from kvlite.model.gguf.index import Order
from kvlite.model.gguf.metadata import Metadata


def state_heads(file: Metadata) -> int:
    """The size of a head of states."""
    return file.whole("ssm.inner_size") // file.size("ssm.time_step_rank")


def delta_net(file: Metadata, config: Config) -> Config:
    """Qwen's hybrids: each fourth layer has attention."""
    interval = file.size("full_attention_interval", 4)
    kinds = (
        FULL if (layer + 1) % interval == 0 else RECURRENT
        for layer in range(config["num_hidden_layers"])
    )
    made = {"layer_types": [*kinds], "linear_value_head_dim": state_heads(file)}
    if file.predicted:
        made["mtp_num_hidden_layers"] = file.predicted
    return made


def grouped(config: Config, *, first: int = 0, dim: int | None = None) -> Order | None:
    """The order of value heads, from row `first` on. Those that are as many as key heads are where
    they belong."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if keys == values:
        return None
    return "grouped", (first, keys, values // keys, dim or config["linear_value_head_dim"])


def grouped_values(config: Config) -> Order | None:
    """The order of value heads behind queries and keys."""
    first = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return grouped(config, first=first)


def by_key_head(config: Config) -> Order:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    own = values // keys * config["linear_value_head_dim"]
    return "by_key_head", (keys, config["linear_key_head_dim"], own)


def granite_alone(file: Metadata, config: Config) -> Config:
    """The MLP of a hybrid all of whose layers have attention is what others share."""
    return {"intermediate_size": file.whole(SHARED_WIDTH, config["intermediate_size"])}


def granite_hybrid(file: Metadata, config: Config) -> Config:
    heads = file.by_layer("attention.head_count_kv")
    made = {
        "layer_types": [FULL if each else RECURRENT for each in heads],
        "position_embedding_type": "rope" if file.value("rope.scaling.finetuned") else "nope",
        "shared_intermediate_size": file.whole(SHARED_WIDTH, config["intermediate_size"]),
        "mamba_d_head": state_heads(file),
        "mamba_expand": file.whole("ssm.inner_size") // config["hidden_size"],
    }
    if not file.whole("expert_count", 0):
        made |= {"num_local_experts": 0, "num_experts_per_tok": 0}
    return made


def lfm2(file: Metadata, config: Config) -> Config:
    heads = file.by_layer("attention.head_count_kv")
    return {"layer_types": [FULL if each else "conv" for each in heads]}


def nemotron(file: Metadata, config: Config) -> Config:
    heads = file.by_layer("attention.head_count_kv")
    widths = file.by_layer("feed_forward_length")
    has_experts = bool(file.whole("expert_count", 0))
    mlp = "moe" if has_experts else "mlp"
    kinds = [
        "attention" if own else mlp if width else "mamba"
        for own, width in zip(heads, widths, strict=True)
    ]
    made = {
        "layers_block_type": kinds,
        "layer_norm_epsilon": config.get("rms_norm_eps", config.get("layer_norm_eps")),
        "mamba_head_dim": state_heads(file),
    }
    if has_experts:
        shared = file.whole(SHARED_WIDTH)
        routed = routed_experts(file, gating=2)
        for unknown in ("first_k_dense_replace", "scoring_func"):
            routed.pop(unknown)
        made |= routed | {"moe_shared_expert_intermediate_size": shared}
        made["moe_latent_size"] = file.whole("moe_latent_size", 0) or None
    return made
