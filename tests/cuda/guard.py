"""A switch of devices for CUDA, in a torch that was built without."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch

from tests.conftest import CACHE

# A torch that has CUDA needs no stand-in, and takes none.
POSSIBLE = not torch.version.cuda and bool(find_spec("triton") and shutil.which("g++"))

# torch switches devices around what is on one; its CPU build has no switch for CUDA.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
extern "C" void set_guard(bool on) {
  c10::impl::device_guard_impl_registry[int(c10::DeviceType::CUDA)].store(on ? &guard : nullptr);
}
"""


@contextmanager
def guarded() -> Iterator[None]:
    """A switch that does nothing, compiled once."""
    built = CACHE / f"guard-{torch.__version__}.so"
    if not built.exists():
        CACHE.mkdir(exist_ok=True)
        home, own = Path(torch.__file__).parent, built.with_suffix(f".{os.getpid()}")
        command = ["g++", "-shared", "-fPIC", "-std=c++20", f"-I{home}/include", "-xc++", "-"]
        command += ["-o", str(own), f"-L{home}/lib", "-lc10"]
        subprocess.run(command, input=GUARD, text=True, check=True)
        own.replace(built)
    library = ctypes.CDLL(str(built))
    library.set_guard(True)
    try:
        yield
    finally:
        library.set_guard(False)
