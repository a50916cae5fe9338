"""Making modules of transformers' classes, in one thread at a time."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from threading import Event
from typing import Any

import torch

from kvlite.errors import require_uncancelled

_LOCK = threading.RLock()


@contextmanager
def making_modules() -> Iterator[None]:
    """While no other thread makes a module or loads the weights of one.

    transformers replaces methods of its own classes while it does so, and sets torch's default
    dtype: in another thread weights would not be tied then, or of the wrong type.
    """
    with _LOCK:
        yield


@contextmanager
def loading(cancel: Event | None) -> Iterator[None]:
    """While weights are loaded, of which the next one is not begun once `cancel` is set.

    Raises:
        Stopped: it was.
    """
    from transformers.utils import logging

    def followed(make: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if given:
            given = _each(given[0], cancel), *given[1:]
        return make(*given, **options)

    with making_modules():
        require_uncancelled(cancel)
        before = logging.set_tqdm_hook(followed)
        try:
            yield
        finally:
            logging.set_tqdm_hook(before)
    require_uncancelled(cancel)


def _each(things: Iterable[Any], cancel: Event | None) -> Iterator[Any]:
    for thing in things:
        require_uncancelled(cancel)
        yield thing


def load_transformers() -> None:
    """Import what every model needs, in one thread at a time: transformers imports its names when
    they are asked for, and some are not there for a second thread meanwhile."""
    with _LOCK:
        import transformers  # noqa: F401

        # It puts another module in its place while it is imported; who waits for that gets the
        # first one, which has nothing in it.
        whole = sys.modules["transformers"]
        for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"):
            getattr(whole, name)


def meta_module(
    config: Any,
    dtype: torch.dtype | None = None,
    *,
    layers: int | None = None,
    attention: str | None = None,
) -> Any:
    """A transformers model of a config on the meta device.

    torch's default dtype stays as it is: other threads may compute meanwhile.

    Args:
        config: is not changed.
        dtype: of its parameters; torch's default without.
        layers: how many it has, if others than the config says.
        attention: transformers' name of the attention function, if not its own choice.
    """
    from transformers import AutoModelForCausalLM

    config = deepcopy(config)
    if layers is not None:
        config.num_hidden_layers = layers
    chosen = {} if attention is None else {"attn_implementation": attention}
    with making_modules(), torch.device("meta"):
        default = torch.get_default_dtype()
        module: Any = AutoModelForCausalLM.from_config(config, dtype=default, **chosen)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype or default)
    module.config.dtype = dtype or default
    return module
