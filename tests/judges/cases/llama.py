"""Cases of Llama, Mistral and Mixtral."""

from tests.judges.case import REMOVED, WINDOW, WINDOW_LOST, Case, llama3, rope, yarn

CASES: list[Case] = [
    Case("llama", "llama", "plain", {"rope_parameters": rope()}),
    Case(
        "llama-tied-bias",
        "llama",
        "tied embeddings, biases",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": REMOVED,
        },
    ),
    Case("llama-llama3", "llama", "llama3", {"rope_parameters": llama3()}, pre="llama-bpe"),
    Case("llama-linear", "llama", "linear", {"rope_parameters": rope("linear", factor=4.0)}),
    Case("llama-yarn", "llama", "yarn", {"rope_parameters": yarn()}, seed=3),
    Case(
        "llama-yarn-factor",
        "llama",
        "yarn with an attention factor and betas",
        {"rope_parameters": yarn(attention_factor=1.5, beta_fast=16.0, beta_slow=2.0)},
        llama_cpp="differs",
        reason="llama.cpp ignores the attention factor",
        seed=9,
    ),
    Case(
        "llama-dynamic",
        "llama",
        "dynamic",
        {"rope_parameters": rope("dynamic", factor=4.0), "max_position_embeddings": 512},
        {"max_position_embeddings": 3072},
        lost={"rope_parameters": rope(), "max_position_embeddings": 3072},
        reason="the converter stores no dynamic scaling",
    ),
    Case(
        "mistral",
        "mistral",
        "no window",
        {"sliding_window": None, "rope_parameters": rope(theta=1e6)},
    ),
    Case(
        "mistral-window",
        "mistral",
        "window",
        {**WINDOW, "rope_parameters": rope()},
        lost={"sliding_window": None},
        reason=WINDOW_LOST,
    ),
    Case(
        "mistral3",
        "mistral",
        "the text of Mistral 3",
        {"sliding_window": None, "rope_parameters": rope(theta=1e6)},
        architecture="Mistral3ForConditionalGeneration",
    ),
    Case(
        "ministral3",
        "ministral3",
        "yarn, temperature by position",
        {
            "rope_parameters": yarn(
                beta_fast=24.0,
                beta_slow=2.0,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.3,
            )
        },
        seed=1,
    ),
    Case(
        "mixtral",
        "mixtral",
        "experts",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": None},
    ),
]
