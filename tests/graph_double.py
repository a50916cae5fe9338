"""A CUDA graph's double on a CPU: the ATen calls of one run, made again on the same tensors, and
the kernels that it launched on a device that a CPU stands in for.

As in a graph, numbers that Python passed are constants and what the host decided stays decided;
whatever would make the host wait for the device is refused.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvlite.engine.step_program import StepProgram
from tests.cuda import fake_cuda

# What brings numbers, or shapes that depend on them, from the device to the host or back.
WAITS = frozenset(
    {
        "_local_scalar_dense",
        "equal",
        "is_nonzero",
        "lift_fresh",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
        "_unique2",
    }
)


class HostWait(RuntimeError):
    """A call that a CUDA graph cannot hold."""


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[Callable[[], None]]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):  # it may be a view or a copy, as its parts say
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        name = func.name().removeprefix("aten::").partition(".")[0]
        by_mask = name == "index" and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        )
        filled = name == "lift_fresh" and not args[0].dim()  # by `x[...] = 0`, from no tensor
        if (
            (name in WAITS and not filled)
            or by_mask
            or func.name() == "aten::repeat_interleave.Tensor"
        ):
            raise HostWait(func.name())
        out = func(*args, **kwargs)
        if not _is_view(func):
            self.calls.append(lambda: _put(func(*args, **kwargs), out))
        return out


def capture(program: StepProgram) -> Callable[[], Tensor]:
    """Record a run, the first of what is returned; which makes it again whenever it is called, into
    the same output."""
    program.rehearse()
    calls: list[Callable[[], None]] = []
    outs: list[Tensor] = []

    def replay() -> Tensor:
        with torch.inference_mode():
            if outs:
                for call in calls:
                    call()
            else:
                device = fake_cuda.FakeCuda.current
                with _Recorder(calls), nullcontext() if device is None else device.recorded(calls):
                    outs.append(program.run())
        return outs[0]

    return replay


def _is_composite(func: Any) -> bool:
    keys, has = torch._C.DispatchKey, torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    return bool(has(name, keys.CompositeImplicitAutograd) and not has(name, keys.CPU))


def _is_view(func: Any) -> bool:
    infos = [each.alias_info for each in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _put(again: Any, made: Any) -> None:
    for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)
