"""What operators return on tensors without numbers is the same whether it is remembered or not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvlite.planner.meta_cache import MetaOpCache


class Remembering(TorchDispatchMode):
    """Runs every operator through outcomes."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes = MetaOpCache()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.outcomes.of(func, args, kwargs or {})


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "new": lambda a, b: (a * b, a @ b.t(), a.float() / 3),
    "new or the same": lambda a, b: (a.to(torch.float32), a.to(a.dtype), a.contiguous()),
    "transposed": lambda a, b: (a + b, a.t() + b.t(), a.t().contiguous(), a.t().reshape(-1)),
    "a view or a copy": lambda a, b: (a.reshape(-1), a.t().reshape(-1), a.flatten()),
    "views": lambda a, b: (a[1:], a.t(), a.expand(2, *a.shape), a.unflatten(1, (2, 2))),
    "in place": lambda a, b: (a.clamp_(0, 1), a.add_(b), a[1:].mul_(2), a.copy_(b)),
    "into another": lambda a, b: torch.maximum(a, b, out=b),
    "resized": lambda a, b: (a.clone().resize_(9, 9), torch.add(a, a, out=b.new_empty(0))),
    "set": lambda a, b: a.clone().set_(b),
    "several": lambda a, b: (*a.topk(2), *a.split(1), *a.sort(), a.aminmax()),
    "made of nothing": lambda a, b: (torch.arange(5, device="meta"), torch.zeros_like(a)),
    "numbers of other types": lambda a, b: (a.int() + 1, a.int() + 1.0, a.int() + True),
    "joined": lambda a, b: (torch.cat([a, b]), torch.cat([a, b], 1), torch.stack([a, b])),
    "by name": lambda a, b: (a.sum(0), a.sum(0, dtype=torch.float64)),
    "no tensor": lambda a, b: a.equal(a) if not a.is_meta else a.dim(),
}


def traits(program: Callable[[Tensor, Tensor], Any], dtype: torch.dtype, rows: int) -> list[Any]:
    """Sizes of all that a program returns, and which share storage with what it was given."""
    given = [torch.empty(rows, 4, dtype=dtype, device="meta") for _ in range(2)]
    made = program(*given)
    found = list(made) if isinstance(made, tuple) else [made]
    found = [leaf for each in found for leaf in (each if isinstance(each, tuple) else [each])]
    return [traits_of(each, given) if isinstance(each, Tensor) else each for each in found] + [
        traits_of(each, given) for each in given
    ]


def traits_of(tensor: Tensor, given: list[Tensor]) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    shared = [storage._cdata == each.untyped_storage()._cdata for each in given]
    sizes = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device
    return *sizes, storage.nbytes(), shared, [tensor is each for each in given]


@torch.inference_mode()
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_remembered_is_what_would_be_returned(name: str) -> None:
    """Each program is run among all the others, so that one could learn from another."""
    program, mode = PROGRAMS[name], Remembering()
    inputs = [(dtype, rows) for dtype in (torch.float32, torch.bfloat16) for rows in (3, 4)]
    for _ in range(2):
        for dtype, rows in inputs:
            expected = traits(program, dtype, rows)
            with mode:
                assert traits(program, dtype, rows) == expected
        with mode:
            for other in PROGRAMS.values():
                traits(other, torch.float32, 3)


@torch.inference_mode()
def test_new_tensors_are_not_each_other() -> None:
    a, mode = torch.empty(3, device="meta"), Remembering()
    with mode:
        made = [a + 1 for _ in range(3)]
    assert len({each.untyped_storage()._cdata for each in made}) == 3


@torch.inference_mode()
def test_an_operator_runs_once_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, ...]] = []
    a, outcomes = torch.empty(3, device="meta"), MetaOpCache()

    def double(tensor: Tensor) -> Tensor:
        ran.append((*tensor.shape,))
        return torch.empty_like(tensor)

    for tensor in (a, a.clone(), a[:2], a):
        assert outcomes.of(double, (tensor,), {}).shape == tensor.shape
    assert ran == [(3,), (2,)]


@torch.inference_mode()
def test_an_operator_on_numbers_runs_every_time() -> None:
    outcomes = MetaOpCache()

    def counted(count: Tensor) -> Tensor:
        return torch.empty(int(count), device="meta")

    for count in (2, 3):
        assert outcomes.of(counted, (torch.tensor(count),), {}).shape == (count,)


@torch.inference_mode()
def test_a_part_of_something_new_takes_all_of_it() -> None:
    outcomes, given = MetaOpCache(), torch.empty(10, device="meta")

    def half(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)[5:]

    for _ in range(2):
        assert outcomes.of(half, (given,), {}).untyped_storage().nbytes() == 40
