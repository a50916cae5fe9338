"""CUDA devices whose numbers are in host memory: what runs on CUDA runs, and is watched, without.

Tensors there say that they are on `cuda:0`, or another. An operation on tensors of two devices
fails, as on CUDA, and so does a kernel while another device is the current one. Whatever makes the
host wait for the device is noted with the line that asked, and operations that launch a kernel are
counted. What is copied to the host without waiting has not arrived, and is nonsense, until somebody
waited for it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import bitsandbytes
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.cuda.guard import guarded
from tests.cuda.kernels import TWINS
from tests.cuda.operators import OWN, asker, is_view, mapped, tensors_in
from tests.cuda.streams import Event, LateCopy, Stream

DEVICE, HOST = torch.device("cuda:0"), torch.device("cpu")
MOST = 3
GIB = 1 << 30

_has, _KEY = torch._C._dispatch_has_kernel_for_dispatch_key, torch._C.DispatchKey
# These read numbers on the host, or make tensors of a size that depends on them.
ASKING = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "repeat_interleave.Tensor")
ASKING += ("_unique2", "unique_consecutive", "bincount", "is_nonzero")
# Where there is no kernel of its own for it, as of an RTX 4090.
ASKING += ("_grouped_mm", "grouped_mm_fallback")
# They take memory, or say that it is seen otherwise; nothing runs.
NO_LAUNCH = ("empty", "new_empty", "resize_", "set_", "_unsafe_view", "lift_fresh", "record_stream")


class CudaTensor(Tensor):
    """A tensor on the device; `numbers` has them, in host memory."""

    numbers: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: Tensor, device: torch.device = DEVICE) -> "CudaTensor":
        with torch.inference_mode(numbers.is_inference()):
            made = Tensor._make_wrapper_subclass(
                cls,
                numbers.shape,
                strides=numbers.stride(),
                storage_offset=numbers.storage_offset(),
                storage_size=numbers.untyped_storage().nbytes(),
                dtype=numbers.dtype,
                device=device,
            )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert FakeCuda.current is not None, "a tensor outlived the device it was on"
        return FakeCuda.current.run(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """As of any tensor; what it is set to brings its numbers."""
        return self.detach()

    @data.setter
    def data(self, other: "CudaTensor") -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.numbers = other.numbers

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def record_stream(self, stream: "Stream") -> None:
        """Nothing is freed early here."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"cuda({self.numbers!r})"


class Generator(torch.Generator):
    """The device's numbers are drawn on the host."""

    def __new__(cls, device: Any = HOST) -> "Generator":
        return super().__new__(cls)


class _Current(threading.local):
    """What is current in a thread: a device, and a stream of each."""

    def __init__(self) -> None:
        self.number = 0
        self.streams = {number: Stream(number) for number in range(MOST)}


class FakeCuda(TorchDispatchMode):
    """The devices.

    Attributes:
        waits: what the host waited for, and which function asked.
        launches: operations that start something on the device, by name; kernels by their own. Both
            of the thread that made this.
        kernels: what is called before its twin is run, with a kernel of Triton, its grid and all
            that it is given.
        maps: whether kernels read pinned host memory.
    """

    current: "FakeCuda | None" = None

    def __init__(self, *, maps: bool = True) -> None:
        super().__init__()
        self.maps = maps
        self.kernels: Callable[..., None] | None = None
        self.waits: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.pinned: dict[int, int] = {}
        self.kept: list[Tensor] = []
        self.thread, self.own = threading.get_ident(), _Current()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else it is imported, which takes seconds

    @classmethod
    def now(cls) -> "FakeCuda":
        assert cls.current is not None
        return cls.current

    def forget(self) -> None:
        """Count from here."""
        self.waits.clear()
        self.launches.clear()

    @property
    def launched(self) -> int:
        """Everything that was."""
        return self.launches.total()

    @property
    def stream(self) -> Stream:
        """The current one of this thread, on its current device."""
        return self.stream_of(None)

    def stream_of(self, device: Any) -> Stream:
        """The current one of a device in this thread."""
        return self.own.streams[self.number(device)]

    def number(self, device: Any) -> int:
        """Of a device; of the current one for None, or where it has none."""
        named = torch.device("cuda", device) if isinstance(device, int) else device
        number = None if named is None else torch.device(named).index
        return self.own.number if number is None else number

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Let a stream be the current one, and its device."""
        number = self.number(stream.device)
        with self.within(number):
            before, self.own.streams[number] = self.own.streams[number], stream
            try:
                yield
            finally:
                self.own.streams[number] = before

    @contextmanager
    def within(self, number: int) -> Iterator[None]:
        """Let a device be the current one."""
        before, self.own.number = self.own.number, number
        try:
            yield
        finally:
            self.own.number = before

    def launches_one(self, name: str) -> None:
        if threading.get_ident() == self.thread:
            self.launches[name] += 1

    def waits_for(self, what: str) -> None:
        if threading.get_ident() == self.thread:
            self.waits[f"{asker()}: {what}"] += 1

    def pins(self, address: int, size: int) -> bool:
        self.pinned[address] = size
        return True

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether all of a host tensor lies within one piece of pinned memory."""
        if isinstance(tensor, CudaTensor) or not tensor.numel():
            return not isinstance(tensor, CudaTensor)
        begin = tensor.data_ptr()
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        end = begin + (last + 1) * tensor.element_size()
        return any(at <= begin and end <= at + size for at, size in self.pinned.items())

    def pinned_copy(self, tensor: Tensor) -> Tensor:
        """Pinned memory that is kept as long as this, so that no other takes its address."""
        made = tensor.clone()
        self.kept.append(made)
        self.pins(made.data_ptr(), made.nbytes)
        return made

    # What runs.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator, on the device or off it."""
        name = func.name().removeprefix("aten::")
        given = list(tensors_in((args, kwargs)))
        here = next((each.device for each in given if isinstance(each, CudaTensor)), None)
        to = self._target(kwargs, here)
        if here is None and to == HOST:
            return self._on_host(func, args, kwargs)
        if name not in OWN and _is_composed(func.name()):
            with self:
                return func.decompose(*args, **kwargs)
        if name in ("copy_", "_to_copy"):
            return self._copied(name, func, args, kwargs, to)
        self._require_one_device(name, given, args)
        there = to if to != HOST else next(each.device for each in given if each.is_cuda)
        self._note_questions(name, args, there)
        if not (name.startswith(NO_LAUNCH) or is_view(func)):
            self.launches_one(name)
        held = {id(each.numbers): each for each in given if isinstance(each, CudaTensor)}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": HOST}
        args, kwargs = mapped(_numbers, args), mapped(_numbers, kwargs)
        out = OWN.get(name, func)(*args, **kwargs)
        if to == HOST:
            return out
        return mapped(
            lambda each: held[id(each)] if id(each) in held else _wrapped(each, there), out
        )

    def _target(self, kwargs: dict[str, Any], here: torch.device | None) -> torch.device:
        """Where the result is."""
        device = kwargs.get("device")
        if device is None:
            return here or HOST
        on_card = torch.device(device).type == "cuda"
        return torch.device("cuda", self.number(device)) if on_card else HOST

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        return self.pinned_copy(func(*args, **{**kwargs, "pin_memory": None}))

    def _copied(
        self, name: str, func: Any, args: Any, kwargs: dict[str, Any], to: torch.device
    ) -> Any:
        """A copy, perhaps from one device to the other, and then perhaps later."""
        self.launches_one(name)
        source = args[1] if name == "copy_" else args[0]
        here, there = isinstance(source, CudaTensor), to != HOST
        if name == "copy_":
            target, there = args[0], isinstance(args[0], CudaTensor)
            later = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        else:
            later = bool(kwargs.get("non_blocking"))
            others = {"device": HOST, "non_blocking": False}
            target = func(_numbers(source), **{**kwargs, **others})
            if here and not there and later:
                target = self.pinned_copy(target)  # as torch does
            target = CudaTensor(target, to) if there else target
        into = _numbers(target)
        if here and not there and self._goes_later(target, source, later):
            numbers = source.numbers.to(into.dtype).expand(into.shape).clone()
            self.stream_of(source.device).queued.append(LateCopy(into, numbers))
            return target
        if there and not here and source.dim():
            self._goes_later(source, target, later)
        if here or there or name == "copy_":
            into.copy_(_numbers(source))
        return target

    def _goes_later(self, host: Tensor, device: Tensor, later: bool) -> bool:
        """Whether a copy between the devices is one that the host need not wait for."""
        whole = host.is_contiguous() and host.shape == device.shape
        if not host.numel() or (later and whole and self.is_pinned(host)):
            return bool(host.numel())
        why = "as asked" if not later else "not contiguous" if not whole else "not pinned"
        self.waits_for(f"a copy of {tuple(host.shape)}, {why}")
        self.stream_of(device.device).arrive()
        return False

    def _require_one_device(self, name: str, given: list[Tensor], args: Any) -> None:
        indices = args[1] if name.startswith(("index.", "index_put")) else ()
        on_card = [each.device for each in given if isinstance(each, CudaTensor)]
        for each in given:
            if each.device in on_card[:1] or name.startswith("set_"):
                continue
            if not isinstance(each, CudaTensor) and not each.dim():
                continue
            if each.is_cuda or not any(each is index for index in indices):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two "
                    f"devices, {on_card[0]} and {each.device}! ({name} in {asker()})"
                )
            self.waits_for("a copy of an index")

    def _note_questions(self, name: str, args: Any, device: torch.device) -> None:
        if name in ASKING:
            self.waits_for(name)
            self.stream_of(device).arrive()
        if name.startswith(("index.", "index_put")):
            masks = (torch.bool, torch.uint8)
            if any(each is not None and each.dtype in masks for each in args[1]):
                self.waits_for("an index of truth values")

    def launch(self, kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        """A Triton kernel: its twin in torch is run."""
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        given = dict(zip(kernel.arg_names, args, strict=False))
        given |= {key: value for key, value in kwargs.items() if key in kernel.arg_names}
        missing = {*kernel.arg_names} - {*given}
        assert not missing, f"{name} is launched without {sorted(missing)}"
        current = torch.device("cuda", self.own.number)
        for key, value in given.items():
            if isinstance(value, CudaTensor):
                assert value.device == current, f"{key} of {name} is on {value.device}"
            elif isinstance(value, Tensor):
                assert self.maps and self.is_pinned(value), f"{key} of {name} is in host memory"
        self.launches_one(name)
        if self.kernels is not None:
            self.kernels(kernel, grid, args, kwargs)
        numbers = {key: _numbers(each) for key, each in given.items()}
        with _disable_current_modes():  # nobody sees how a twin does it
            TWINS[name](SimpleNamespace(grid=grid, **numbers))

    @contextmanager
    def recorded(self, calls: list[Callable[[], None]]) -> Iterator[None]:
        """Note the kernels that are launched, as calls that launch them again."""

        def note(kernel: Any, grid: Any, args: Any, kwargs: Any) -> None:
            calls.append(lambda: self.launch(kernel, grid, *args, **kwargs))

        with mock.patch.object(self, "kernels", note):
            yield


def _is_composed(name: str) -> bool:
    """Whether an operator is no more than others, one after the other."""
    return _has(name, _KEY.CompositeImplicitAutograd) and not _has(name, _KEY.CPU)


def _numbers(each: Any) -> Any:
    return each.numbers if isinstance(each, CudaTensor) else each


def _wrapped(each: Any, device: torch.device) -> Any:
    return CudaTensor(each, device) if isinstance(each, Tensor) else each


def _properties(*_: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name="NVIDIA GeForce RTX 4090",
        multi_processor_count=128,
        total_memory=24 * GIB,
        major=8,
        minor=9,
        uuid="0",
    )


def _limited(fraction: float, device: Any = None) -> None:
    """As of torch, which takes no device without a number here."""
    if isinstance(device, torch.device) and device.index is None:
        raise ValueError(f"Expected a torch.device with a specified index, but got: {device}")


@contextmanager
def fake_cuda(*, maps: bool = True, count: int = 1) -> Iterator[FakeCuda]:
    """So many devices, as all that there are.

    Args:
        maps: whether their kernels read pinned host memory; not all systems allow that.
    """
    from triton.runtime.jit import JITFunction

    device = FakeCuda(maps=maps)
    runtime: dict[str, Any] = {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: count,
        "current_device": lambda: device.own.number,
        "get_device_capability": lambda *_: (8, 9),
        "get_device_properties": _properties,
        "get_device_name": lambda *_: _properties().name,
        "is_bf16_supported": lambda **_: True,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda named=None: device.stream_of(named),
        "stream": device.on,
        "device_of": lambda tensor: (
            device.within(tensor.device.index) if tensor.is_cuda else nullcontext()
        ),
        "synchronize": lambda named=None: device.stream_of(named).synchronize(),
        "empty_cache": lambda: None,
        "memory_allocated": lambda *_: GIB,
        "memory_reserved": lambda *_: GIB,
        "memory_snapshot": list,
        "max_memory_allocated": lambda *_: GIB,
        "reset_peak_memory_stats": lambda *_: None,
        "set_per_process_memory_fraction": _limited,
        "mem_get_info": lambda *_: (23 * GIB, 24 * GIB),
    }
    replaced: list[tuple[Any, str, Any]] = [
        (Tensor, "is_pinned", lambda tensor, *_: device.is_pinned(tensor)),
        (Tensor, "pin_memory", lambda tensor, *_: device.pinned_copy(tensor)),
        (torch, "Generator", Generator),
        (
            JITFunction,
            "run",
            lambda kernel, *args, grid, warmup, **kwargs: device.launch(
                kernel, grid, *args, **kwargs
            ),
        ),
    ]
    kvlite: dict[str, Any] = {
        "kvlite.offload.kv.transfer.register": lambda at, size, _: device.pins(at, size),
        "kvlite.offload.kv.transfer.release": lambda *_: None,
        "kvlite.offload.kv.transfer.reads_pinned": lambda _: device.maps,
        "kvlite.memory.nvml.card_use": lambda _: None,
    }
    converting = torch.__future__.get_overwrite_module_params_on_conversion()
    with ExitStack() as stack:
        stack.enter_context(guarded())
        for name, value in runtime.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        for path, value in kvlite.items():
            stack.enter_context(mock.patch(path, value))
        # bitsandbytes keeps tables that it made on the device.
        stack.enter_context(mock.patch.dict(bitsandbytes.functional.name2qmap))
        # A module's parameters become tensors of the device, not their data.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, converting)
        # What `torch.tensor` makes for the device comes there by a copy that is seen.
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        FakeCuda.current = Stream.device_on = device
        stack.callback(setattr, FakeCuda, "current", None)
        stack.enter_context(device)
        yield device
