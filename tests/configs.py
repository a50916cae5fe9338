"""config.json files as they are published, without what neither sizes nor rotations depend on.

Those of the makers' own repositories, with the keys these have and the values null where they are
so there; old ones have `rope_scaling` and `torch_dtype`, those that transformers 5 saved have
`rope_parameters` and `dtype`. Those of granite, olmo3, smollm3, exaone4, seed_oss, cohere2,
ernie4_5, glm4, glm4_moe, glm4_moe_lite, deepseek_v2, deepseek_v3, ministral3, hunyuan_v1_dense,
gpt_oss, gemma3n_text, gemma4_text, qwen3_next, qwen3_5_text, qwen3_5_moe_text, lfm2, nemotron_h,
granitemoehybrid and llama4_text were written from memory: their sizes may not be the published.
"""

import json
from pathlib import Path
from typing import Any

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
