"""Modules of Triton kernels: in Triton's interpreter on a CPU, compiled on a CUDA device."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

import kvlite.ops

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def kernels(module: str) -> Iterator[ModuleType]:
    """A module; without a GPU over a copy of triton of its own, as it must be told to interpret
    before it is imported, which others may have done by now or may do later."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
            held = {name: sys.modules.pop(name) for name in _python_of_triton()}
        yield importlib.import_module(module)
        if DEVICE.type == "cpu":
            for name in _python_of_triton():
                # Kept under another name, as Python tidies up only what it finds here at its end.
                sys.modules[f"interpreted.{module}.{name}"] = sys.modules.pop(name)
            sys.modules.update(held)
            # `from kvlite.ops import ...` looks there first.
            for name in [*vars(kvlite.ops)]:
                if name.startswith("triton_"):
                    delattr(kvlite.ops, name)
            for name, loaded in held.items():
                if name.startswith("kvlite.ops."):
                    setattr(kvlite.ops, name.rpartition(".")[2], loaded)


def _python_of_triton() -> list[str]:
    """Loaded modules that depend on whether triton interprets; what is compiled is loaded but
    once."""
    return [
        name
        for name in sys.modules
        if (name.split(".")[0] == "triton" and not name.startswith("triton._C"))
        or name.startswith("kvlite.ops.triton_")
    ]
