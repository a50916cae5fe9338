"""Where transformers' parameters are in a GGUF file.

The names are llama.cpp's converter's, the same for all architectures; what one calls otherwise is
in its entry (`model.gguf.architectures`). The gguf package has a map, too: it lacks names of
several architectures, and says of one parameter several.
"""

from collections.abc import Mapping

# Each of a parameter's places is tried in turn: a tensor, or several whose rows come one after the
# other.
Place = tuple[str, ...]


def _table(pairs: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in pairs.split())


# Parts of layers begin with a dot; what has the same name in attention, MLPs and mixers is named
# without these. First what has a weight, and perhaps a bias.
_MODULES = _table(
    """
    model.embed_tokens=token_embd model.embeddings=token_embd
    model.norm=output_norm model.norm_f=output_norm model.embedding_norm=token_embd_norm
    lm_head=output
    .input_layernorm=attn_norm .operator_norm=attn_norm .norm=attn_norm
    .post_attention_layernorm=ffn_norm .ffn_norm=ffn_norm
    .q_proj=attn_q .k_proj=attn_k .v_proj=attn_v .qkv_proj=attn_qkv
    .o_proj=attn_output .self_attn.out_proj=attn_output
    .q_norm=attn_q_norm .q_layernorm=attn_q_norm .query_layernorm=attn_q_norm
    .k_norm=attn_k_norm .k_layernorm=attn_k_norm .key_layernorm=attn_k_norm
    .q_a_proj=attn_q_a .q_a_layernorm=attn_q_a_norm .q_b_proj=attn_q_b
    .kv_a_proj_with_mqa=attn_kv_a_mqa .kv_a_layernorm=attn_kv_a_norm
    .gate_proj=ffn_gate .up_proj=ffn_up .down_proj=ffn_down .gate_up_proj=ffn_up
    .w1=ffn_gate .w3=ffn_up .w2=ffn_down .gate=ffn_gate_inp .router=ffn_gate_inp
    .shared_experts.gate_proj=ffn_gate_shexp .shared_expert.gate_proj=ffn_gate_shexp
    .shared_experts.up_proj=ffn_up_shexp .shared_expert.up_proj=ffn_up_shexp
    .shared_experts.down_proj=ffn_down_shexp .shared_expert.down_proj=ffn_down_shexp
    .shared_expert_gate=ffn_gate_inp_shexp
    .linear_attn.norm=ssm_norm .linear_attn.out_proj=ssm_out
    .in_proj_qkv=attn_qkv .in_proj_z=attn_gate .in_proj_a=ssm_alpha .in_proj_b=ssm_beta
    .in_proj_ba=ssm_ba
    .in_proj=ssm_in .conv1d=ssm_conv1d
    .mamba.norm=ssm_norm .mamba.out_proj=ssm_out .mixer.norm=ssm_norm .mixer.out_proj=ssm_out
    .fc1_latent_proj=ffn_latent_down .fc2_latent_proj=ffn_latent_up
    .conv.in_proj=shortconv.in_proj .conv.conv=shortconv.conv .conv.out_proj=shortconv.out_proj
    .pre_feedforward_layernorm=ffn_norm .post_feedforward_layernorm=post_ffw_norm
    .per_layer_input_gate=inp_gate .per_layer_projection=proj
    .post_per_layer_input_norm=post_norm
    .correction_coefs=altup_correct_coef .prediction_coefs=altup_predict_coef
    .modality_router=altup_router .router_norm=altup_router_norm
    .linear_left=laurel_l .linear_right=laurel_r .post_laurel_norm=laurel_post_norm
    model.embed_tokens_per_layer=per_layer_token_embd
    model.per_layer_model_projection=per_layer_model_proj
    model.per_layer_projection_norm=per_layer_proj_norm
    mtp.eh_proj=nextn.eh_proj mtp.enorm=nextn.enorm mtp.hnorm=nextn.hnorm
    mtp.post_norm=nextn.shared_head_norm
    """
)
# What is a parameter or buffer of its own; places, with | between them, of tensors, with +.
_PARAMETERS = _table(
    """
    .experts.gate_up_proj=ffn_gate_up_exps.weight|ffn_gate_exps.weight+ffn_up_exps.weight
    .experts.gate_up_proj_bias=ffn_gate_up_exps.bias|ffn_gate_exps.bias+ffn_up_exps.bias
    .experts.up_proj=ffn_up_exps.weight
    .experts.down_proj=ffn_down_exps.weight .experts.down_proj_bias=ffn_down_exps.bias
    .gate.e_score_correction_bias=exp_probs_b.bias
    .router.proj.weight=ffn_gate_inp.weight .router.scale=ffn_gate_inp.scale
    .router.per_expert_scale=ffn_down_exps.scale
    .layer_scalar=layer_output_scale.weight
    .sinks=attn_sinks.weight|attn_sinks
    .kv_b_proj.weight=attn_kv_b.weight|attn_k_b.weight+attn_v_b.weight
    .input_linear.weight=ffn_gate_shexp.weight+ffn_up_shexp.weight|ffn_gate.weight+ffn_up.weight
    .output_linear.weight=ffn_down_shexp.weight|ffn_down.weight
    .in_proj_qkvz.weight=attn_qkv.weight+attn_gate.weight
    .A_log=ssm_a .D=ssm_d .dt_bias=ssm_dt.bias
    .correct_output_scale=altup_correct_scale.weight
    """
)


def places(part: str, own: Mapping[str, str]) -> tuple[Place, ...]:
    """Where a parameter may be. Of a layer's, `part` is what comes after the layer's number; `own`
    are names of modules that an architecture calls otherwise than others."""
    if found := _named(part, _PARAMETERS):
        return tuple(tuple(place.split("+")) for place in found.split("|"))
    module, _, last = part.rpartition(".")
    called = own.get(module) or _named(module, _MODULES)
    return ((f"{called}.{last}",),) if called else ()


def _named(part: str, table: Mapping[str, str]) -> str | None:
    _, dot, rest = part.removeprefix(".").partition(".")
    return table.get(part) or (table.get(dot + rest) if part[:1] == "." else None)
