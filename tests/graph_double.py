"""A CUDA graph's double on a CPU: the ATen calls of one run, made again on the same tensors.

As in a graph, numbers that Python passed are constants and what the host decided stays decided;
whatever would make the host wait for the device is refused.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvlite.engine.step_program import StepProgram

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
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.before: list[tuple[Tensor, Tensor]] = []

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
        self.before += [(each, each.clone()) for each in _written(func, args)]
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out


def capture(program: StepProgram) -> Callable[[], Tensor]:
    """Record a run, which leaves everything as it was; what is returned makes it, every time into
    the same output."""
    program.rehearse()
    generator = program.sampler.generator
    drawn = generator.get_state()
    with _Recorder() as recorder:
        out = program.run()
    generator.set_state(drawn)
    for written, before in reversed(recorder.before):
        written.copy_(before)

    def replay() -> Tensor:
        with torch.inference_mode():
            for func, args, kwargs, made in recorder.calls:
                if not _is_view(func):
                    _put(func(*args, **kwargs), made)
        return out

    return replay


def _is_composite(func: Any) -> bool:
    keys, has = torch._C.DispatchKey, torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    return bool(has(name, keys.CompositeImplicitAutograd) and not has(name, keys.CPU))


def _written(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """The arguments that a call writes to."""
    both = zip(func._schema.arguments, args, strict=False)
    return [each for told, each in both if told.alias_info and told.alias_info.is_write]


def _is_view(func: Any) -> bool:
    infos = [each.alias_info for each in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _put(again: Any, made: Any) -> None:
    for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)
