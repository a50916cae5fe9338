"""Models whose layers come in turn, beside the same ones that have them all."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlite.engine.prefill import prefill
from kvlite.engine.step import decode_step
from kvlite.methods import parse_method
from kvlite.methods.layer_policy import layer_policies
from kvlite.model.experts import experts_of, stacked
from kvlite.model.load import LoadedModel, load_model, require_whole
from kvlite.model.weights import PLAIN, Weights
from kvlite.offload.weights.experts import LEAST, Resident
from kvlite.offload.weights.layers import StreamedLayers
from kvlite.offload.weights.loader import STREAMED
from tests.conftest import Tiny

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Pair:
    """One model twice: with all its layers, and with layers that come in turn."""

    whole: LoadedModel
    streamed: LoadedModel

    @property
    def layers(self) -> StreamedLayers:
        """The ones that come."""
        assert isinstance(self.streamed.layers, StreamedLayers)
        return self.streamed.layers


def streamed(
    tiny: Tiny,
    folder: Path,
    setting: str = "disk",
    weights: str = "fp32",
    resident: Resident = LEAST,
) -> LoadedModel:
    """The model, saved to a folder and opened from there. Its linear layers are left as
    transformers has them, so that what is computed is the same to the last digit."""
    if not (folder / "config.json").exists():
        tiny.reference.save_pretrained(folder)
    opened, attached = STREAMED[setting]
    chosen = Weights(weights, PLAIN.get(weights, torch.float32))
    module, found = opened(folder, device=CPU, weights=chosen)
    require_whole(found, str(folder))
    align(module)
    model = replace(tiny.model, module=module, path=folder, weights=chosen)
    model.layers = attached(model, resident)
    return model


def loaded(setting: str, folder: Path, **given: Any) -> LoadedModel:
    """The model in a folder, with layers that come in turn."""
    opened, attached = STREAMED[setting]
    model = load_model(folder, opened=opened, **given)
    model.layers = attached(model)
    return model


def align(module: Any) -> None:
    """Let weights begin where products like it: where a file is mapped to in memory is seen in the
    last digit."""
    for parameter in module.parameters():
        if parameter.numel():
            parameter.data = parameter.data.clone()


def pair(tiny: Tiny, folder: Path, setting: str = "disk") -> Pair:
    return Pair(tiny.model, streamed(tiny, folder, setting))


def prompt(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 199, (count,), generator=generator).tolist()


def two_turns(model: LoadedModel) -> list[Tensor]:
    """Logits after each of two prompts in chunks, and after each of four tokens that follow."""
    cache, heard = model.empty_cache(), []
    for turn in range(2):
        ids = torch.tensor([prompt(40, turn)])
        policies = layer_policies(parse_method("full"), model.shape, 400, cache.seen + 40)
        heard.append(prefill(model, cache, ids, policies, chunk=16))
        for _ in range(4):
            heard.append(decode_step(model, cache, heard[-1].argmax(-1), policies))
    return heard


def layer_bytes(module: Any) -> int:
    """Bytes of one layer's weights."""
    return sum(parameter.nbytes for parameter in module.parameters())


def slot_bytes(module: Any) -> int:
    """Bytes that one layer takes where each of its weights begins at a multiple of 256; experts,
    which come by themselves, left out."""
    apart = {id(each) for experts in experts_of(module) for each in stacked(experts)}
    own = [each for each in module.parameters() if id(each) not in apart]
    return sum(-(-parameter.nbytes // 256) * 256 for parameter in own)


def expert_bytes(module: Any) -> list[int]:
    """Bytes of the experts of each layer that has any."""
    return [sum(each.nbytes for each in stacked(experts)) for experts in experts_of(module)]


def rest_bytes(module: Any) -> int:
    """Bytes of a model without its decoder layers, what is tied counted once."""
    layers = {id(parameter) for parameter in module.model.layers.parameters()}
    own = [each for each in module.parameters() if id(each) not in layers]
    return sum(each.nbytes for each in [*own, *module.buffers()])


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
