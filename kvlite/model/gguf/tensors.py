"""Which of a GGUF file's tensors a model's parameters are made of."""

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from kvlite.errors import ModelError
from kvlite.model.architectures import EXPANDS
from kvlite.model.files import Stored
from kvlite.model.gguf.architectures import GGUFArchitecture
from kvlite.model.gguf.config import gguf_architecture
from kvlite.model.gguf.index import GGUFTensor, Order
from kvlite.model.gguf.metadata import Metadata
from kvlite.model.gguf.names import Place, places
from kvlite.model.shape import transformers_config

_LAYER = re.compile(r"model\.layers\.(\d+)(\..+)")
_STACKED = re.compile(r"model\.(altup_projections|altup_unembed_projections)\.(\d+)\.weight")
_STACKS = {
    "altup_projections": "altup_proj.weight",
    "altup_unembed_projections": "altup_unembd_proj.weight",
}
_FUSED = (".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj.")
# Parts of other kinds that some programs put into a language model's file.
_BESIDE = ("v.", "mm.", "a.", "s.")
# What layers that use another's keys and values have all the same.
_BORROWED = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight", "attn_v_norm.weight")


def tensors_of(
    file: Metadata, plain: dict[str, Any], config: Any, module: Any, head: Any
) -> dict[str, GGUFTensor]:
    """The tensors of a model, by transformers' names of parameters and buffers.

    Args:
        plain: the config that was made of the file's header.
        config: the same as transformers has it.
        module: the model on the meta device.
        head: likewise its MTP head, if it has one.

    Raises:
        ModelError: a parameter is missing or has another size, or there is a tensor without one.
    """
    own = gguf_architecture(file.header)
    wanted = {
        name: tuple(value.shape)
        for name, value in module.state_dict().items()
        if name != "lm_head.weight" or not config.tie_word_embeddings
    }
    if head is not None:
        wanted |= {f"mtp.{name}": tuple(each.shape) for name, each in head.named_parameters()}
    turned = {
        ".self_attn.q_proj": plain["num_attention_heads"],
        ".self_attn.k_proj": plain.get("num_key_value_heads", 0),
    }
    made = {
        name: _tensor(name, shape, file, plain, own, turned if own.permuted else {})
        for name, shape in wanted.items()
    }
    used = {(piece.path, piece.begin) for tensor in made.values() for piece in tensor.pieces}
    unused = _unused(file, config, has_head=head is not None)
    for name, stored in file.tensors.items():
        if (
            (stored.path, stored.begin) not in used
            and name not in file.tensors_read
            and not unused(name)
        ):
            raise ModelError(
                f"{file.path} has a tensor {name!r}, which kvlite does not know of a "
                f"{file.header.architecture!r} model and would answer wrongly without: use another "
                "program, or the model's safetensors"
            )
    return made


def _unused(file: Metadata, config: Any, *, has_head: bool) -> Any:
    """Whether a tensor is nothing that this model needs."""
    shared = getattr(config, "num_kv_shared_layers", 0) or 0
    borrow = range(file.layers - shared, file.layers)
    ahead = range(file.layers, file.layers + file.predicted)

    def unused(name: str) -> bool:
        if name.startswith(_BESIDE):
            return True
        if not name.startswith("blk."):
            return False
        number, _, part = name.removeprefix("blk.").partition(".")
        if not number.isdigit():
            return False
        if int(number) in borrow and part in _BORROWED:
            return True
        # Embeddings and a head of its own are the model's, once more.
        again = part.startswith(("nextn.embed_tokens", "nextn.shared_head_head"))
        return int(number) in ahead and (not has_head or again)

    return unused


def _tensor(
    name: str,
    shape: tuple[int, ...],
    file: Metadata,
    plain: dict[str, Any],
    own: GGUFArchitecture,
    turned: dict[str, int],
) -> GGUFTensor:
    """The tensor of a parameter; `turned` are the heads of projections whose rows are in the order
    of neighboring channels."""
    prefix, part = _placed(name, file)
    if stacked := _STACKED.fullmatch(name):
        pieces: tuple[Stored, ...] = (
            _part(file.stored(_STACKS[stacked[1]]), int(stacked[2]), 1, name),
        )
    else:
        pieces = _pieces(prefix, part, shape, file, own, name)
    rows, columns = _order(own.orders, part, plain), _order(own.columns, part, plain)
    if heads := turned.get(part.rpartition(".")[0]):
        rows = "halves", (heads,)
    numbers = ""
    if own.norm_offset and "norm" in part and "linear_attn" not in part:
        numbers = "less_one"
    elif part.endswith("A_log"):
        numbers = "log_of_minus"
    elif part.removesuffix(".weight").endswith(EXPANDS):
        numbers = "expanded"
    transposed = part in own.transposed
    _require_shape(name, shape, pieces, file, transposed=transposed, numbers=numbers)
    return GGUFTensor(pieces, shape, rows, columns, transposed, numbers)


def _placed(name: str, file: Metadata) -> tuple[str, str]:
    """What the names of a parameter's tensors begin with, and what comes after a layer's number."""
    if layer := _LAYER.fullmatch(name):
        return f"blk.{layer[1]}.", layer[2]
    if not name.startswith("mtp."):
        return "", name
    part = name.removeprefix("mtp.")
    of_layer = part.startswith("mtp_block.")
    return f"blk.{file.layers}.", part.removeprefix("mtp_block") if of_layer else name


def _pieces(
    prefix: str,
    part: str,
    shape: tuple[int, ...],
    file: Metadata,
    own: GGUFArchitecture,
    name: str,
) -> tuple[Stored, ...]:
    tried = [*places(part, own.modules, own.parameters)]
    for place in tried:
        found = [file.tensors.get(prefix + each) for each in place]
        if all(found):
            return tuple(each for each in found if each is not None)
    fused = file.tensors.get(f"{prefix}attn_qkv.{part.rpartition('.')[2]}")
    if fused is not None and part.startswith(_FUSED):
        # Keys and values have as many rows as each other, and come last.
        first = {"q": 0, "k": fused.shape[0] - 2 * shape[0], "v": fused.shape[0] - shape[0]}
        return (_part(fused, first[part.removeprefix(".self_attn.")[0]], shape[0], name),)
    if len(shape) == 3 and tried:
        one_by_one = [*_of_experts(prefix, tried[-1], shape[0], file)]
        if all(one_by_one):
            return tuple(each for each in one_by_one if each is not None)
    expected = " or ".join("+".join(prefix + each for each in place) for place in tried)
    raise ModelError(
        f"{file.path} has no {expected or name!r}, which a {file.header.architecture!r} model "
        "needs: get the file again"
    )


def _of_experts(prefix: str, place: Place, experts: int, file: Metadata) -> Iterator[Stored | None]:
    """The first files have a tensor for each expert."""
    for expert in range(experts):
        for each in place:
            yield file.tensors.get(prefix + each.replace("_exps.", f".{expert}."))


def _part(whole: Stored, first: int, count: int, name: str) -> Stored:
    """Some of a tensor's rows, or of the matrices that are stored as one."""
    if not 0 <= first <= whole.shape[0] - count:
        raise ModelError(f"{whole.path} has too little for {name}: get the file again")
    size = (whole.end - whole.begin) // whole.shape[0]
    begin = whole.begin + first * size
    return Stored(whole.path, whole.kind, (count, *whole.shape[1:]), begin, begin + count * size)


def _order(orders: dict[str, Any], part: str, plain: dict[str, Any]) -> Order | None:
    """As an entry gives it, unless nothing moves."""
    if part not in orders:
        return None
    name, given = orders[part]
    numbers = given(plain)
    # With as many value heads as key heads each is where it belongs.
    return None if name == "grouped" and numbers[2] == 1 else (name, numbers)


def _require_shape(
    name: str,
    shape: tuple[int, ...],
    pieces: tuple[Stored, ...],
    file: Metadata,
    *,
    transposed: bool,
    numbers: str,
) -> None:
    """Raises ModelError unless pieces make up a parameter of this shape."""
    columns = shape[-2] if transposed else shape[-1]
    fits = prod(shape) == sum(piece.count for piece in pieces)
    if len(shape) > 1 and numbers != "expanded" and not name.endswith("bias"):
        fits = fits and all(piece.shape[-1] == columns for piece in pieces)
    if not fits:
        sizes = " + ".join(str(piece.shape) for piece in pieces)
        raise ModelError(
            f"the weights of {file.path} do not fit what it says of the model: {name} has sizes "
            f"{sizes}, not {shape}: get the file again"
        )


def module_of(folder: Path) -> tuple[Any, Any, Any]:
    """transformers' config in a folder, and the model and its MTP head on the meta device."""
    import torch

    from kvlite.model.making import meta_module
    from kvlite.model.mtp import empty_mtp, has_mtp

    config = transformers_config(folder).get_text_config()
    module = meta_module(config, torch.bfloat16)
    return config, module, empty_mtp(module, torch.bfloat16) if has_mtp(config) else None
