"""Tiny random models as transformers makes them, and what transformers answers."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.judges.case import REMOVED, Case, Config
from tests.judges.vocabulary import WORDS, tokenizer

PROMPT, ANSWER = 600, 16
SEEDS = 24


@dataclass(frozen=True)
class Expected:
    """What transformers makes of `ids`: tokens, and log-probabilities of the first.

    `margin` is the least distance of a chosen token from the next best.
    """

    ids: list[int]
    tokens: list[int]
    log_probabilities: np.ndarray[Any, np.dtype[np.float32]]
    margin: float

    def save(self, path: Path) -> None:
        np.savez(
            path,
            ids=self.ids,
            want=self.tokens,
            log_probabilities=self.log_probabilities,
            margin=self.margin,
        )

    @classmethod
    def load(cls, path: Path) -> "Expected":
        with np.load(path) as saved:
            ids, tokens = saved["ids"].tolist(), saved["want"].tolist()
            return cls(ids, tokens, saved["log_probabilities"], float(saved["margin"]))

    @property
    def quality(self) -> tuple[bool, float]:
        """Whether tokens are ordinary and various, and the margin, which is enough from 0.02."""
        ordinary = max(self.tokens) < WORDS and len(set(self.tokens)) >= ANSWER // 2
        return ordinary, min(self.margin, 0.02)

    @property
    def clear(self) -> bool:
        """Whether no rounding decides."""
        return self.quality == (True, 0.02)


def make(case: Case, folder: Path) -> None:
    """Save a model with its tokenizer, and what is expected of the file made of it."""
    torch.set_num_threads(1)
    best: tuple[tuple[bool, float, bool], PreTrainedModel, Expected] | None = None
    for seed in range(case.seed, case.seed + SEEDS):
        model = random_model(case, seed)
        told = as_file_says(case, model)
        expected = answer(told, seed)
        quality = (*expected.quality, expected.clear and _steady(told, expected, case.rounding / 2))
        if best is None or quality > best[0]:
            best = quality, model, expected
        if quality[-1]:
            break
    assert best is not None
    _, model, expected = best
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    expected.save(folder / "want.npz")
    path = folder / "config.json"
    config = json.loads(path.read_text()) | case.saved
    if case.architecture:
        config["architectures"] = [case.architecture]
    kept = {key: value for key, value in config.items() if value is not REMOVED}
    path.write_text(json.dumps(kept, indent=1))
    if case.extra_layers:
        _add_prediction_layer(folder / "model.safetensors", case)
    if case.kind == "gemma3n_text":
        _add_unused_keys(folder / "model.safetensors", case)


def random_model(case: Case, seed: int) -> PreTrainedModel:
    """A model whose attention looks at single tokens, and whose experts and logits differ."""
    torch.manual_seed(seed)
    model = _model(case.kind, case.sizes).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _fill(name, weight, case)
        if model.config.tie_word_embeddings:
            # Weak where they are scaled, or each token would follow itself.
            gemma = case.kind.startswith("gemma")
            _scale(model.get_input_embeddings().weight, 0.5 if gemma else 2.0)
        for name, buffer in model.named_buffers():
            if "e_score" in name:
                buffer.normal_(0, 0.2)
    return model


def _scale(weight: Tensor, gain: float) -> None:
    weight.normal_(0, gain / weight.shape[-1] ** 0.5)


def _fill(name: str, weight: Tensor, case: Case) -> None:
    if name.endswith(("A_log", ".D")):
        weight.add_(torch.randn_like(weight) * 0.1)
    elif name.endswith("dt_bias"):
        # transformers clamps steps of time under 0.001 in some models; there are none.
        weight.normal_(-2.5, 0.5)
    elif "norm" in name and weight.dim() < 3 and not name.endswith("bias"):
        weight.add_(torch.randn_like(weight) * 0.2 + _more(name, case))
    elif name.endswith("scale") or "layer_scalar" in name:
        weight.copy_(0.7 + torch.rand_like(weight))
    elif weight.dim() < 2:
        weight.normal_(0, 0.15)
    else:
        query = any(each in name for each in ("q_proj", "k_proj", "q_b_proj", "qkv", "kv_b"))
        _scale(weight, 1.4 + case.sharper if query else 3.0 if "lm_head" in name else 1.0)


def _more(name: str, case: Case) -> float:
    """What is added to norms, for attention that looks at few tokens, and clear logits."""
    if any(each in name for each in ("q_norm", "k_norm", "query_l", "key_l")):
        return 0.4 + case.sharper
    return 2.0 if case.kind.startswith("gemma") and name == "model.norm.weight" else 0.0


def as_file_says(case: Case, model: PreTrainedModel) -> PreTrainedModel:
    """The model without what the file has lost."""
    if not case.lost:
        return model
    other = _model(case.kind, {**case.sizes, **case.lost}).eval()
    other.load_state_dict(model.state_dict())
    return other


def _model(kind: str, sizes: Config) -> PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(kind, **json.loads(json.dumps(sizes)))
        made: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
    return made


@torch.inference_mode()
def answer(model: PreTrainedModel, seed: int) -> Expected:
    """Read 600 random tokens and go on greedily."""
    generator = torch.Generator().manual_seed(seed + 100)
    ids = torch.randint(WORDS, (1, PROMPT), generator=generator)
    reply = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=ANSWER,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack(reply.logits)[:, 0].float()
    best = logits.topk(2).values
    return Expected(
        ids[0].tolist(),
        reply.sequences[0, PROMPT:].tolist(),
        logits[0].log_softmax(-1).numpy(),
        float((best[:, 0] - best[:, 1]).min()),
    )


@torch.inference_mode()
def _steady(model: PreTrainedModel, expected: Expected, enough: float) -> bool:
    """Whether roundings choose no other experts, which would tell in all that follows."""
    kept = {name: weight.clone() for name, weight in model.named_parameters()}
    try:
        for _ in range(4 if hasattr(model.config, "num_experts_per_tok") else 1):
            for weight in model.parameters():
                weight.mul_(1 + 5e-7 * torch.randn_like(weight))
            logits = model(torch.tensor([expected.ids]), use_cache=False).logits[0, -1]
            moved = logits.log_softmax(-1).numpy() - expected.log_probabilities
            if abs(moved).max() > enough:
                return False
    finally:
        for name, weight in model.named_parameters():
            weight.copy_(kept[name])
    return True


def _add_prediction_layer(path: Path, case: Case) -> None:
    """A layer for multi-token prediction, like the model's last, with what joins it."""
    weights = load_file(path)
    hidden, last = case.sizes["hidden_size"], case.sizes["num_hidden_layers"] - 1
    qwen = case.kind.startswith("qwen")
    prefix = f"model.layers.{last}."
    for name in [name for name in weights if name.startswith(prefix)]:
        to = "mtp.layers.0." if qwen else f"model.layers.{last + 1}."
        weights[to + name.removeprefix(prefix)] = weights[name].flip(0).contiguous()
    for name, shape in _joining(qwen, last + 1, hidden):
        weights[name] = torch.randn(shape) / hidden**0.5
    save_file(weights, path, {"format": "pt"})
    head = {name: weight for name, weight in weights.items() if name.startswith("mtp.")}
    save_file(head, path.with_name("head.safetensors"))


def _add_unused_keys(path: Path, case: Case) -> None:
    """Layers that share keys and values have their own, unused, in what is published."""
    weights = load_file(path)
    layers = case.sizes["num_hidden_layers"]
    for layer in range(layers - case.sizes["num_kv_shared_layers"], layers):
        for name in ("k_proj", "v_proj", "k_norm"):
            to, of = (f"model.layers.{each}.self_attn.{name}.weight" for each in (layer, 0))
            weights[to] = weights[of].flip(0).contiguous()
    save_file(weights, path, {"format": "pt"})


def _joining(qwen: bool, layer: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if qwen:
        yield "mtp.fc.weight", (hidden, 2 * hidden)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            yield f"mtp.{name}.weight", (hidden,)
        return
    yield f"model.layers.{layer}.eh_proj.weight", (hidden, 2 * hidden)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield f"model.layers.{layer}.{name}.weight", (hidden,)
