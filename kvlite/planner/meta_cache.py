"""A cache of what operators return for meta tensors, which follows from shapes alone."""

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

_Made: TypeAlias = int | tuple[torch.Size, tuple[int, ...], torch.dtype]
"""A result: the place of an argument that is returned, or shape, stride and dtype of a new one."""


class MetaOpCache:
    """Runs an operator on meta tensors once per combination of argument shapes. Later calls return
    new tensors of the remembered shapes, in a fraction of the time. Operators that return views or
    no tensors, or that change shapes, are always run."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[type, list[_Made]]] = {}
        self._run_always: set[Any] = set()

    def of(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operator."""
        if func in self._run_always:
            return func(*args, **kwargs)
        told: list[Any] = [func]
        given: list[Tensor] = []
        if not _tell((*args, *kwargs.items()), told, given):
            return func(*args, **kwargs)
        key = tuple(told)
        known = self._known.get(key)
        if known is None:
            return self._learn(key, func, args, kwargs, given)
        kind, made = known
        if kind is Tensor:
            return _again(made[0], given)
        return kind(_again(each, given) for each in made)

    def _learn(
        self, key: Any, func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        storages = [_storage(each) for each in given]
        result = func(*args, **kwargs)
        told: list[Any] = [func]
        _tell((*args, *kwargs.items()), told, [])
        unchanged = tuple(told) == key and storages == [_storage(each) for each in given]
        found = [result] if isinstance(result, Tensor) else result
        made = _recorded(found, given) if unchanged and isinstance(found, list | tuple) else None
        if made is None:
            self._run_always.add(func)
        else:
            self._known[key] = Tensor if isinstance(result, Tensor) else type(result), made
        return result


def _tell(arguments: Iterable[Any], told: list[Any], given: list[Tensor]) -> bool:
    """Add what an operator's result depends on to `told`, and its tensors to `given`; False if one
    of them is not a meta tensor."""
    for each in arguments:
        if isinstance(each, Tensor):
            if not each.is_meta:
                return False
            told += each.shape, each.stride(), each.dtype
            given.append(each)
        elif isinstance(each, list | tuple):
            told.append(len(each))
            if not _tell(each, told, given):
                return False
        else:
            told += type(each), each
    return True


def _recorded(found: Iterable[Any], given: list[Tensor]) -> list[_Made] | None:
    """How to make the results again; None if one is neither new storage nor an argument."""
    places = {id(each): place for place, each in enumerate(given)}
    taken = {_storage(each)[0] for each in given}
    made: list[_Made] = []
    for each in found:
        if id(each) in places:
            made.append(places[id(each)])
            continue
        if not isinstance(each, Tensor) or not each.is_meta or _storage(each)[0] in taken:
            return None
        new = each.shape, each.stride(), each.dtype
        if each.storage_offset() or _storage(_again(new, given))[1] != _storage(each)[1]:
            return None
        taken.add(_storage(each)[0])
        made.append(new)
    return made


def _again(made: _Made, given: list[Tensor]) -> Tensor:
    """A result that was made before, for new arguments."""
    if isinstance(made, int):
        return given[made]
    shape, stride, dtype = made
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _storage(tensor: Tensor) -> tuple[int, int]:
    """A tensor's storage, and its bytes."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()
