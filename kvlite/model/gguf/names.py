"""Where transformers' parameters are in a GGUF file.

The names are llama.cpp's converter's. Those in `COMMON` are the same for all architectures; what
one calls otherwise is in its entry (`model.gguf.architectures`). The gguf package has a map, too:
it lacks names of several architectures, and says of one parameter several.
"""

from collections.abc import Mapping

# Each of a parameter's places is tried in turn: a tensor, or several whose rows come one after the
# other.
Place = tuple[str, ...]

_EXPERTS = ("ffn_gate_exps.weight", "ffn_up_exps.weight")


def of_one(name: str) -> tuple[Place, ...]:
    """The places of a parameter that is one tensor."""
    return ((name,),)


def _modules(pairs: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in pairs.split())


# What has a weight, and perhaps a bias. Parts of layers begin with a dot.
MODULES = _modules(
    """
    model.embed_tokens=token_embd model.embeddings=token_embd
    model.norm=output_norm model.norm_f=output_norm model.embedding_norm=token_embd_norm
    lm_head=output
    .input_layernorm=attn_norm .operator_norm=attn_norm .norm=attn_norm
    .post_attention_layernorm=ffn_norm .ffn_norm=ffn_norm
    .self_attn.q_proj=attn_q .self_attn.k_proj=attn_k .self_attn.v_proj=attn_v
    .self_attn.qkv_proj=attn_qkv .self_attn.o_proj=attn_output .self_attn.out_proj=attn_output
    .self_attn.q_norm=attn_q_norm .self_attn.k_norm=attn_k_norm
    .self_attn.q_layernorm=attn_q_norm .self_attn.k_layernorm=attn_k_norm
    .self_attn.query_layernorm=attn_q_norm .self_attn.key_layernorm=attn_k_norm
    .self_attn.q_a_proj=attn_q_a .self_attn.q_a_layernorm=attn_q_a_norm
    .self_attn.q_b_proj=attn_q_b .self_attn.kv_a_proj_with_mqa=attn_kv_a_mqa
    .self_attn.kv_a_layernorm=attn_kv_a_norm
    .mlp.gate_proj=ffn_gate .mlp.up_proj=ffn_up .mlp.down_proj=ffn_down .mlp.gate_up_proj=ffn_up
    .feed_forward.gate_proj=ffn_gate .feed_forward.up_proj=ffn_up .feed_forward.down_proj=ffn_down
    .feed_forward.w1=ffn_gate .feed_forward.w3=ffn_up .feed_forward.w2=ffn_down
    .mlp.gate=ffn_gate_inp .mlp.router=ffn_gate_inp .feed_forward.router=ffn_gate_inp
    .block_sparse_moe.router=ffn_gate_inp
    .mlp.shared_experts.gate_proj=ffn_gate_shexp .mlp.shared_experts.up_proj=ffn_up_shexp
    .mlp.shared_experts.down_proj=ffn_down_shexp
    .mlp.shared_expert.gate_proj=ffn_gate_shexp .mlp.shared_expert.up_proj=ffn_up_shexp
    .mlp.shared_expert.down_proj=ffn_down_shexp .mlp.shared_expert_gate=ffn_gate_inp_shexp
    .feed_forward.shared_expert.gate_proj=ffn_gate_shexp
    .feed_forward.shared_expert.up_proj=ffn_up_shexp
    .feed_forward.shared_expert.down_proj=ffn_down_shexp
    .linear_attn.conv1d=ssm_conv1d .linear_attn.norm=ssm_norm .linear_attn.out_proj=ssm_out
    .linear_attn.in_proj_qkv=attn_qkv .linear_attn.in_proj_z=attn_gate
    .linear_attn.in_proj_a=ssm_alpha .linear_attn.in_proj_b=ssm_beta
    .linear_attn.in_proj_ba=ssm_ba
    .mamba.in_proj=ssm_in .mamba.conv1d=ssm_conv1d .mamba.norm=ssm_norm .mamba.out_proj=ssm_out
    .mixer.in_proj=ssm_in .mixer.conv1d=ssm_conv1d .mixer.norm=ssm_norm .mixer.out_proj=ssm_out
    .mixer.q_proj=attn_q .mixer.k_proj=attn_k .mixer.v_proj=attn_v .mixer.o_proj=attn_output
    .mixer.up_proj=ffn_up .mixer.down_proj=ffn_down .mixer.gate=ffn_gate_inp
    .mixer.shared_experts.up_proj=ffn_up_shexp .mixer.shared_experts.down_proj=ffn_down_shexp
    .mixer.fc1_latent_proj=ffn_latent_down .mixer.fc2_latent_proj=ffn_latent_up
    .conv.in_proj=shortconv.in_proj .conv.conv=shortconv.conv .conv.out_proj=shortconv.out_proj
    .pre_feedforward_layernorm=ffn_norm .post_feedforward_layernorm=post_ffw_norm
    .per_layer_input_gate=inp_gate .per_layer_projection=proj
    .post_per_layer_input_norm=post_norm
    .altup.correction_coefs=altup_correct_coef .altup.prediction_coefs=altup_predict_coef
    .altup.modality_router=altup_router .altup.router_norm=altup_router_norm
    .laurel.linear_left=laurel_l .laurel.linear_right=laurel_r
    .laurel.post_laurel_norm=laurel_post_norm
    model.embed_tokens_per_layer=per_layer_token_embd
    model.per_layer_model_projection=per_layer_model_proj
    model.per_layer_projection_norm=per_layer_proj_norm
    mtp.eh_proj=nextn.eh_proj mtp.enorm=nextn.enorm mtp.hnorm=nextn.hnorm
    mtp.post_norm=nextn.shared_head_norm
    """
)
# What is a parameter or buffer of its own.
PARAMETERS: dict[str, tuple[Place, ...]] = {
    ".mlp.experts.gate_up_proj": (("ffn_gate_up_exps.weight",), _EXPERTS),
    ".mlp.experts.down_proj": of_one("ffn_down_exps.weight"),
    ".mlp.experts.gate_up_proj_bias": (
        ("ffn_gate_up_exps.bias",),
        ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    ),
    ".mlp.experts.down_proj_bias": of_one("ffn_down_exps.bias"),
    ".feed_forward.experts.gate_up_proj": (("ffn_gate_up_exps.weight",), _EXPERTS),
    ".feed_forward.experts.down_proj": of_one("ffn_down_exps.weight"),
    ".block_sparse_moe.experts.gate_up_proj": (("ffn_gate_up_exps.weight",), _EXPERTS),
    ".block_sparse_moe.experts.down_proj": of_one("ffn_down_exps.weight"),
    ".experts.gate_up_proj": (("ffn_gate_up_exps.weight",), _EXPERTS),
    ".experts.down_proj": of_one("ffn_down_exps.weight"),
    ".mixer.experts.up_proj": of_one("ffn_up_exps.weight"),
    ".mixer.experts.down_proj": of_one("ffn_down_exps.weight"),
    ".mlp.gate.e_score_correction_bias": of_one("exp_probs_b.bias"),
    ".mixer.gate.e_score_correction_bias": of_one("exp_probs_b.bias"),
    ".router.proj.weight": of_one("ffn_gate_inp.weight"),
    ".router.scale": of_one("ffn_gate_inp.scale"),
    ".router.per_expert_scale": of_one("ffn_down_exps.scale"),
    ".layer_scalar": of_one("layer_output_scale.weight"),
    ".self_attn.sinks": (("attn_sinks.weight",), ("attn_sinks",)),
    ".self_attn.kv_b_proj.weight": (("attn_kv_b.weight",), ("attn_k_b.weight", "attn_v_b.weight")),
    ".shared_mlp.input_linear.weight": (
        ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
        ("ffn_gate.weight", "ffn_up.weight"),
    ),
    ".shared_mlp.output_linear.weight": (("ffn_down_shexp.weight",), ("ffn_down.weight",)),
    ".linear_attn.A_log": of_one("ssm_a"),
    ".linear_attn.dt_bias": of_one("ssm_dt.bias"),
    ".linear_attn.in_proj_qkvz.weight": (("attn_qkv.weight", "attn_gate.weight"),),
    ".mamba.A_log": of_one("ssm_a"),
    ".mamba.D": of_one("ssm_d"),
    ".mamba.dt_bias": of_one("ssm_dt.bias"),
    ".mixer.A_log": of_one("ssm_a"),
    ".mixer.D": of_one("ssm_d"),
    ".mixer.dt_bias": of_one("ssm_dt.bias"),
    ".altup.correct_output_scale": of_one("altup_correct_scale.weight"),
}


def places(part: str, own: Mapping[str, str]) -> tuple[Place, ...]:
    """Where a parameter may be. Of a layer's, `part` is what comes after the layer's number; `own`
    are names of modules that an architecture calls otherwise than others."""
    if found := PARAMETERS.get(part):
        return found
    module, _, last = part.rpartition(".")
    called = own.get(module) or MODULES.get(module)
    return of_one(f"{called}.{last}") if called else ()
