"""Operators: which function called one, what it is given, and those that a CPU has no name for."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2] / "kvlite"


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """It takes half precision alone, and as many KV heads as query heads."""
    assert q.dtype in (torch.float16, torch.bfloat16) and q.shape[1] == k.shape[1]
    out: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout, causal, scale=scale
    )
    return out


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: None,
    compute_lse: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Its lse has rows in multiples of 32."""
    assert q.shape[1] == k.shape[1] and bias is None and compute_lse
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout, causal, scale=scale
    )
    return out, torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32))


def _histc(numbers: Tensor, bins: int, least: float, most: float) -> Tensor:
    """A CPU counts no integers."""
    return torch.histc(numbers.float(), bins, least, most).to(numbers.dtype)


OWN: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_efficient_attention": _efficient,
    "scaled_dot_product_attention": torch.ops.aten.scaled_dot_product_attention,
    "histc": _histc,
    "_fused_rms_norm": torch.ops.aten._fused_rms_norm,
}


def tensors_in(given: Any) -> Iterator[Tensor]:
    """Those among an operator's arguments."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, dict | list | tuple):
        for each in given.values() if isinstance(given, dict) else given:
            yield from tensors_in(each)


def mapped(change: Callable[[Any], Any], given: Any) -> Any:
    """An operator's arguments or results, each changed."""
    if isinstance(given, dict):
        return {name: mapped(change, each) for name, each in given.items()}
    if isinstance(given, list | tuple):
        return type(given)(mapped(change, each) for each in given)
    return change(given)


def is_view(func: Any) -> bool:
    infos = [each.alias_info for each in func._schema.returns]
    return any(each is not None and not each.is_write for each in infos)


def asker() -> str:
    """The innermost function of the program, or what calls it from outside."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(str(ROOT)):
        frame = frame.f_back
    return frame.f_code.co_qualname
