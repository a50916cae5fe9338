"""Which of a GGUF file's tensors a model's parameters are made of."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlite.errors import ModelError
from kvlite.model.architectures import EXPANDS
from kvlite.model.files import Stored
from kvlite.model.gguf.architectures import GGUFArchitecture, Ordered
from kvlite.model.gguf.config import gguf_architecture
from kvlite.model.gguf.index import GGUFTensor, Order
from kvlite.model.gguf.metadata import Metadata
from kvlite.model.gguf.names import places
from kvlite.model.shape import transformers_config

_LAYER = re.compile(r"model\.layers\.(\d+)(\..+)")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_STACKED = re.compile(r"model\.(altup_projections|altup_unembed_projections)\.(\d+)\.weight")
_STACKS = {
    "altup_projections": "altup_proj.weight",
    "altup_unembed_projections": "altup_unembd_proj.weight",
}
_FUSED = (".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj.")
# Types that weights are not stored in, or that nothing dequantizes.
_NO_NUMBERS = {"F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K"}
# Parts of other kinds that some programs put into a language model's file.
_BESIDE = ("v.", "mm.", "a.")
# What layers that use another's keys and values have all the same.
_BORROWED = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight", "attn_v_norm.weight")


def tensors_of(
    file: Metadata, plain: dict[str, Any], config: Any, module: Any, head: Any
) -> dict[str, GGUFTensor]:
    """The tensors of a model, by transformers' names of parameters and buffers. Raises ModelError
    if a parameter is missing or has another size, or there is a tensor without one.

    Args:
        plain: the config that was made of the file's header.
        config: the same as transformers has it.
        module: the model on the meta device.
        head: likewise its MTP head, if it has one.
    """
    wanted = {
        name: tuple(value.shape)
        for name, value in module.state_dict().items()
        if name != "lm_head.weight" or not config.tie_word_embeddings
    }
    if head is not None:
        wanted |= {f"mtp.{name}": tuple(each.shape) for name, each in head.named_parameters()}
    placing = _Placing(file, plain, gguf_architecture(file.header))
    made = {name: placing.tensor(name, shape) for name, shape in wanted.items()}
    used = {(piece.path, piece.begin) for tensor in made.values() for piece in tensor.pieces}
    for name, stored in file.tensors.items():
        known = (stored.path, stored.begin) in used or name in file.tensors_read
        if not known and not _is_unused(name, file, plain, has_head=head is not None):
            raise ModelError(
                f"{file.path} has a tensor {name!r}, which kvlite does not know of a "
                f"{file.header.architecture!r} model and would answer wrongly without: use another "
                "program, or the model's safetensors"
            )
    return made


def _is_unused(name: str, file: Metadata, plain: dict[str, Any], *, has_head: bool) -> bool:
    if name.startswith(_BESIDE):
        return True
    block = _BLOCK.fullmatch(name)
    if block is None:
        return False
    number, part = int(block[1]), block[2]
    if (
        file.layers <= number < file.layers + file.predicted
    ):  # embeddings and a head of its own are the model's, once more
        again = ("nextn.embed_tokens", "nextn.shared_head_head")
        return not has_head or part.startswith(again)
    return number >= file.layers - plain.get("num_kv_shared_layers", 0) and part in _BORROWED


@dataclass(frozen=True)
class _Placing:
    file: Metadata
    plain: dict[str, Any]
    own: GGUFArchitecture

    def tensor(self, name: str, shape: tuple[int, ...]) -> GGUFTensor:
        own = self.own
        prefix, part = self._placed(name)
        pieces = self._pieces(name, prefix, part, shape)
        numbers = ""
        if own.norm_offset and "norm" in part and "linear_attn" not in part:
            numbers = "less_one"
        elif part.endswith("A_log"):
            numbers = "log_of_minus"
        elif part.removesuffix(".weight").endswith(EXPANDS):
            numbers = "expanded"
        made = GGUFTensor(
            pieces,
            shape,
            rows=self._rotated(part) or self._order(own.orders, part),
            columns=self._order(own.columns, part),
            transposed=part in own.transposed,
            numbers=numbers,
        )
        self._require_fit(name, made)
        return made

    def _placed(self, name: str) -> tuple[str, str]:
        if layer := _LAYER.fullmatch(name):
            return f"blk.{layer[1]}.", layer[2]
        if not name.startswith("mtp."):
            return "", name
        part = name.removeprefix("mtp.")
        of_layer = part.startswith("mtp_block.")
        return f"blk.{self.file.layers}.", part.removeprefix("mtp_block") if of_layer else name

    def _pieces(
        self, name: str, prefix: str, part: str, shape: tuple[int, ...]
    ) -> tuple[Stored, ...]:
        tensors = self.file.tensors
        if stacked := _STACKED.fullmatch(name):
            return (_part_of(self.file.stored(_STACKS[stacked[1]]), int(stacked[2]), 1, name),)
        tried = places(part, self.own.modules)
        # The first files have a tensor for each expert.
        experts = range(shape[0] if len(shape) == 3 and tried else 0)
        by_expert = tuple(
            each.replace("_exps.", f".{expert}.") for expert in experts for each in tried[-1]
        )
        for place in (*tried, by_expert):
            if place and all(prefix + each in tensors for each in place):
                return tuple(tensors[prefix + each] for each in place)
        fused = tensors.get(f"{prefix}attn_qkv.{part.rpartition('.')[2]}")
        if fused is not None and part.startswith(_FUSED):
            # Keys and values have as many rows as each other, and come last.
            first = {"q": 0, "k": fused.shape[0] - 2 * shape[0], "v": fused.shape[0] - shape[0]}
            return (_part_of(fused, first[part.removeprefix(".self_attn.")[0]], shape[0], name),)
        if part in self.own.zero:
            return ()
        expected = " or ".join("+".join(prefix + each for each in place) for place in tried)
        raise ModelError(
            f"{self.file.path} has no {expected or name!r}, which a "
            f"{self.file.header.architecture!r} model needs: get the file again"
        )

    def _rotated(self, part: str) -> Order | None:
        heads = {
            ".self_attn.q_proj": "num_attention_heads",
            ".self_attn.k_proj": "num_key_value_heads",
        }.get(part.rpartition(".")[0])
        return ("halves", (self.plain[heads],)) if heads and self.own.permuted else None

    def _order(self, orders: Mapping[str, Ordered], part: str) -> Order | None:
        return orders[part](self.plain) if part in orders else None

    def _require_fit(self, name: str, made: GGUFTensor) -> None:
        if kinds := _NO_NUMBERS & {piece.kind for piece in made.pieces}:
            raise ModelError(
                f"{self.file.path}: the weights of {name} are of type {min(kinds)}, which are none "
                "that kvlite reads: get a file of another quantization, such as Q4_K_M"
            )
        fits = made.count == sum(piece.count for piece in made.pieces) or not made.pieces
        if made.by_expert:
            fits = fits and len({piece.shape for piece in made.pieces}) == 1
        if len(made.shape) > 1 and made.numbers != "expanded" and not name.endswith("bias"):
            columns = made.shape[-2 if made.transposed else -1]
            fits = fits and all(piece.shape[-1] == columns for piece in made.pieces)
        if not fits:
            sizes = " + ".join(str(piece.shape) for piece in made.pieces)
            raise ModelError(
                f"the weights of {self.file.path} do not fit what it says of the model: {name} has "
                f"sizes {sizes}, not {made.shape}: get the file again"
            )


def _part_of(whole: Stored, first: int, count: int, name: str) -> Stored:
    if not 0 <= first <= whole.shape[0] - count:
        raise ModelError(f"{whole.path} has too little for {name}: get the file again")
    size = (whole.end - whole.begin) // whole.shape[0]
    begin = whole.begin + first * size
    return Stored(whole.path, whole.kind, (count, *whole.shape[1:]), begin, begin + count * size)


def module_of(folder: Path) -> tuple[Any, Any, Any]:
    """transformers' config in a folder, and the model and its MTP head on the meta device."""
    import torch

    from kvlite.model.mtp import empty_mtp, has_mtp
    from kvlite.model.transformers_lock import meta_module

    config = transformers_config(folder).get_text_config()
    module = meta_module(config, torch.bfloat16)
    return config, module, empty_mtp(module, torch.bfloat16) if has_mtp(config) else None
