"""Programs run on meta tensors (shapes without data) to see how much memory they would take.

If a program asks for a value, it gets the one that leads to the most memory: a mask lets everything
through, two tensors compare equal.
"""

from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvlite.memory.meter import TensorMeter
from kvlite.planner.meta_cache import MetaOpCache

T = TypeVar("T")

_META = torch.device("meta")
_aten = torch.ops.aten


class MetaMeter(TensorMeter):
    """Counts the bytes that meta tensors would take, and lets programs run on them."""

    def __init__(
        self, held: Iterable[Tensor] = (), *, host: Iterable[Tensor] = (), op_cache: MetaOpCache
    ) -> None:
        """As a `TensorMeter`; `op_cache` may have been used under other meters."""
        super().__init__(held, host=host)
        self.op_cache = op_cache

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator on meta tensors, and count what it returned."""
        if func in (_aten._local_scalar_dense.default, _aten.item.default):
            return 0 if args[0].is_meta else func(*args)  # others have numbers
        if func is _aten._is_all_true.default:  # what torch.distributions asks of its parameters
            return torch.ones((), dtype=torch.bool, device="cpu")
        if func is _aten.is_nonzero.default:
            return not args[0].is_meta and func(*args)
        if func is _aten.equal.default:
            return bool(args[0].shape == args[1].shape)
        if func is _aten.cat.default:
            args = [_without_numbers(each) for each in args[0]], *args[1:]
        kwargs = dict(kwargs or {})
        if func is _aten.index.Tensor:
            args = args[0], [_let_through(each) for each in args[1]]
        if _multiplies_with_experts(func):
            rows, experts = args[:2]
            func, args = _aten.empty.memory_format, ([rows.shape[0], experts.shape[2]],)
            kwargs = {"dtype": rows.dtype, "device": _META}
        if func is _aten.logaddexp.default:  # of the same shape, in a tenth of the time
            func = _aten.add.Tensor
        if func is _aten.nonzero.default:
            (found,) = args
            func, args = _aten.empty.memory_format, ([found.numel(), found.dim()],)
            kwargs = {"dtype": torch.int64, "device": _META}
        if _names_device(func):
            tensors = any(isinstance(each, Tensor | list) for each in args)
            if kwargs.get("device") is not None or not tensors:
                kwargs["device"] = _META
            args = [_META if isinstance(each, torch.device) else each for each in args]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.op_cache.of(func, args, kwargs)

    def _takes_memory(self, tensor: Tensor) -> bool:
        return tensor.is_meta


@cache
def _multiplies_with_experts(func: Any) -> bool:
    """Whether it is torch's grouped product of rows with their experts, or that of transformers,
    which is registered late."""
    return func.name() in ("aten::_grouped_mm", "transformers::grouped_mm_fallback")


@cache
def _names_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _let_through(index: Any) -> Any:
    if isinstance(index, Tensor) and index.dtype == torch.bool:
        return torch.empty(index.shape[0], dtype=torch.int64, device=_META)
    return index


def _without_numbers(tensor: Tensor) -> Tensor:
    """A constant that was made from a list, as a meta tensor."""
    return tensor if tensor.is_meta else torch.empty_like(tensor, device=_META)


class _MetaMode(TorchFunctionMode):
    """Deep copies of tensors are meta tensors, and share storage as the originals do."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        made = self._meta(tensor)
        memo[id(tensor)] = made
        return made

    def _meta(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.storages:
            flat = torch.empty(storage.nbytes(), dtype=torch.uint8, device=_META)
            self.storages[key] = flat.untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype, device=_META)
        return empty.set_(
            self.storages[key], tensor.storage_offset(), tensor.shape, tensor.stride()
        )


def meta(thing: T) -> T:
    """A deep copy of an object whose tensors become meta tensors; their data is not read."""
    with _MetaMode():
        return deepcopy(thing)
