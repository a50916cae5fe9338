"""Creating transformers modules, in one thread at a time."""

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
    """Held while a module is created or its weights are loaded.

    Meanwhile transformers replaces methods of its own classes and sets torch's default dtype: in
    another thread weights would not be tied, or of the wrong type.
    """
    with _LOCK:
        yield


@contextmanager
def loading(cancel: Event | None) -> Iterator[None]:
    """Held while weights are loaded; no further one is begun once `cancel` is set. Raises Stopped
    if it was set."""
    from transformers.utils import logging

    def checked(things: Iterable[Any]) -> Iterator[Any]:
        for thing in things:
            require_uncancelled(cancel)
            yield thing

    def followed(make: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return make(*map(checked, given[:1]), *given[1:], **options)

    with making_modules():
        require_uncancelled(cancel)
        before = logging.set_tqdm_hook(followed)
        try:
            yield
        finally:
            logging.set_tqdm_hook(before)
    require_uncancelled(cancel)


def load_transformers() -> None:
    """Import what every model needs, in one thread at a time: while transformers imports a name on
    access, a second thread may not find it."""
    with _LOCK:
        import transformers  # noqa: F401

        # It replaces itself in sys.modules while it is imported; a thread that waits for the import
        # gets the first module, which is empty.
        whole = sys.modules["transformers"]
        for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"):
            getattr(whole, name)


def keeps_float32(module: Any, name: str, half: bool) -> bool:
    """Whether transformers loads a weight of a model as float32 where it loads others in 16 bits;
    `half` if those are float16."""
    where_half = module._keep_in_fp32_modules if half else ()
    return any(each in name for each in (*module._keep_in_fp32_modules_strict, *where_half))


def meta_module(
    config: Any,
    dtype: torch.dtype | None = None,
    *,
    layers: int | None = None,
    attention: str | None = None,
) -> Any:
    """A transformers model on the meta device.

    torch's default dtype stays as it is: other threads may compute meanwhile.

    Args:
        config: is not changed.
        dtype: of its parameters, instead of torch's default.
        layers: their number, instead of the config's.
        attention: transformers' name of the attention function, instead of its own choice.
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
