"""MTP heads that kvlite reads from GGUF files, against those of the original models."""

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import kvlite
from kvlite.model.gguf.index import read_index
from kvlite.model.mtp import empty_mtp, has_mtp
from kvlite.offload.weights.gguf import open_gguf_mtp
from tests.judges.cases import ALL
from tests.judges.make import Judged

CASES = [Judged(case) for case in ALL.values() if case.extra_layers and "qwen3_5" in case.kind]
# Qwen's names of what transformers' head has.
NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "mtp_block": "layers.0",
    "post_norm": "norm",
}
EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def original(name: str, saved: dict[str, Tensor]) -> Tensor:
    """A parameter, by transformers' name."""
    first, _, rest = name.partition(".")
    stored = f"mtp.{NAMES[first]}.{rest}"
    if ".experts." not in stored:
        return saved.pop(stored)
    experts, _, kind = stored.rpartition(".")
    count = len({key.split(".")[5] for key in saved if key.startswith(f"{experts}.")})
    parts = [
        [saved.pop(f"{experts}.{expert}.{part}.weight") for part in EXPERTS[kind]]
        for expert in range(count)
    ]
    return torch.stack([torch.cat(each) for each in parts])


@pytest.mark.long
@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("judged", CASES, ids=lambda judged: judged.name)
def test_a_head_has_the_parameters_of_the_original(judged: Judged) -> None:
    """Norms to the last bit but two: 1 was added to them."""
    model = kvlite.load(str(judged.file), device="cpu", weights="fp32").model
    index = read_index(model.path)
    assert has_mtp(model.module.config) and index is not None
    head = empty_mtp(model.module, torch.float32)
    assert open_gguf_mtp(head, index, device=torch.device("cpu"), weights=model.weights)
    saved = load_file(judged.head)
    for name, ours in head.state_dict().items():
        far = 3e-7 if "norm" in name else 0.0
        torch.testing.assert_close(ours, original(name, saved), rtol=0, atol=far, msg=name)
    assert not saved
