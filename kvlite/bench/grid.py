"""The grid of a run: methods x budgets x bits x recall, always with `full` and `random` in it."""

from collections.abc import Iterable, Sequence
from itertools import product

from kvlite.bench.fork import Choice, Recalled
from kvlite.bench.options import NO_RECALL
from kvlite.bench.prose import bundled_prose
from kvlite.cache import KVBits, parse_kv_bits
from kvlite.config.units import readable
from kvlite.conversation.runner import Runner
from kvlite.errors import SettingError
from kvlite.memory.device_budget import ram_limit
from kvlite.methods import parse_method
from kvlite.methods.budget import require_budget
from kvlite.methods.full import Full
from kvlite.methods.layer_policy import can_recall
from kvlite.methods.random import Random
from kvlite.model.load import LoadedModel
from kvlite.offload.kv.placement import host_kv_bytes

RECALL_BITS = ("16", "8", "4")


def choices(
    specs: Sequence[str],
    budgets: Sequence[int],
    longest: int,
    kv_bits: Sequence[str],
    recalls: Sequence[Recalled | None],
) -> list[Choice]:
    """Every method with every budget, bits and recall; `full` first and `random` last, if not
    named, and `full` unquantized in any case. A method that cannot recall is measured once
    without.

    Args:
        budgets: mean entries a KV head and layer.
        longest: tokens of the longest prompt, the budget of methods that free nothing.

    Raises:
        SettingError: there is no such method or bits, or a budget is too small.
    """
    methods = [parse_method(spec) for spec in specs]
    named = {method.name for method in methods}
    if Full.name not in named:
        methods.insert(0, Full())
    if Random.name not in named:
        methods.append(Random(window=min(Random().window, max(1, min(budgets) // 2))))
    widths = [parse_kv_bits(each) for each in kv_bits]
    grid = [Choice(Full(), longest)]
    for method in methods:
        # A method that frees nothing is the same at every budget.
        sizes = budgets if method.compresses else [longest]
        # The control is one of methods, not of widths or of recall.
        compared = method.name != Random.name or method.name in named
        own: Sequence[KVBits | None] = widths if compared else [None]
        back = recalls if compared and can_recall(method) else [None]
        grid += [Choice(method, *each) for each in product(sizes, own, back)]
    for choice in grid:
        require_budget(choice.method, choice.budget)
    return list(dict.fromkeys(grid))


def recalled(given: Sequence[str], bits: Sequence[str]) -> list[Recalled | None]:
    """Parse recall: `off`, or entries that each token of an answer may look for, with each of the
    host store's bits.

    Raises:
        SettingError: it is neither, or a host store cannot have such bits.
    """
    require_known("--recall-bits", bits, RECALL_BITS)
    widths = [parse_kv_bits(each) for each in bits]
    ways: list[Recalled | None] = []
    for text in given:
        if text == NO_RECALL:
            ways.append(None)
        elif text.isascii() and text.isdecimal() and len(text) < 10:
            ways += [Recalled(int(text), each) for each in widths]
        else:
            raise SettingError(
                f"--recall {text!r} is neither off nor a number of entries: give 128, or 0 to "
                "recall between turns only"
            )
    return list(dict.fromkeys(ways))


def require_memory(choices: Iterable[Choice], model: LoadedModel, tokens: int) -> None:
    """Raises SettingError if host memory is too small for recall.

    Args:
        tokens: of the longest prompt and its answer.
    """
    stores = {each.recall.bits for each in choices if each.recall}
    needed = max(
        (host_kv_bytes(model.shape, tokens, 0, model.dtype.itemsize, bits) for bits in stores),
        default=0,
    )
    if needed > (limit := ram_limit(None, 0)):
        raise SettingError(
            f"recall would take {readable(needed)} of host memory for {tokens:,} tokens, and "
            f"half of what is free is {readable(limit)}: give fewer --tokens, or --recall-bits 4"
        )


def require_known(flag: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises SettingError for the first value that is not known."""
    offered = list(known)
    for each in given:
        if each not in offered:
            raise SettingError(f"{flag} {each!r} is not one of {', '.join(offered)}")


def fitting_prose(runner: Runner, longest: int, extra: int) -> list[int]:
    """Token ids of the bundled prose.

    Args:
        longest, extra: tokens of the longest prompt, and of an answer.

    Raises:
        SettingError: prompts are longer than the prose or the model's context.
    """
    ids: list[int] = runner.tokenizer.encode(bundled_prose())
    require_length(runner, longest, extra, len(ids))
    return ids


def require_length(runner: Runner, longest: int, extra: int, text: int | None = None) -> None:
    """Raises SettingError if prompts are longer than the model's context, or than a text of so
    many tokens. Args are those of `fitting_prose`."""
    trained = runner.shape.max_context
    limit, about = trained - extra, f"the model was trained for {trained:,}"
    if text is not None:
        limit, about = min(limit, text), f"the text has {text:,} tokens, {about}"
    if longest > limit:
        raise SettingError(f"--tokens {longest} is too long: give up to {limit} ({about})")
