"""What the settings of a turn come to, checked before anything is read; and notes on them."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from kvlite.cache import KVBits
from kvlite.cache.bits import AUTO
from kvlite.config.settings import Settings
from kvlite.config.units import readable
from kvlite.engine.implementations import lacking
from kvlite.engine.oom_actions import LEAST
from kvlite.errors import ContextError, RecallError, SettingError
from kvlite.memory.oom import BUDGET, EIGHT_BITS, FOUR_BITS, OOMPolicy
from kvlite.methods.base import Method
from kvlite.methods.budget import require_budget
from kvlite.methods.engine_config import EngineConfig
from kvlite.methods.layer_policy import LayerPolicy, can_recall, loses
from kvlite.model.load import LoadedModel
from kvlite.offload import HostKVStore
from kvlite.offload.kv.placement import host_kv_bytes, place
from kvlite.ops.device import WIDEST
from kvlite.planner.ceiling import may_round

if TYPE_CHECKING:
    from kvlite.conversation.context import Context

SMALL_MODEL, LONG = 1_000_000_000, 32_768


@dataclass(frozen=True)
class TurnConfig:
    """What the settings of a turn come to.

    Attributes:
        seen: tokens of the conversation once the turn is read.
        limit: tokens at which the answer ends,
        limited_by: which are the longest answer allowed, or what the context has left.
        planned: tokens of the answer that memory is planned for, at most as many.
        method: fitted to the model.
        asked_bits: as the user set them; None if keys and values are not to be quantized.
        bits: as they are quantized, which may be fewer.
        budget: entries, mean over KV heads and layers.
        least: the budget that `auto` may come down to; `budget` of any other.
        may_round: whether `auto` may round everything to 8 bits.
    """

    seen: int
    limit: int
    limited_by: Literal["answer", "context"]
    planned: int
    method: Method
    asked_bits: KVBits | None
    bits: KVBits | None
    budget: int
    least: int
    may_round: bool

    @classmethod
    def of(
        cls, context: "Context", ids: list[int], config: EngineConfig, *, answers: bool
    ) -> "TurnConfig":
        """For a turn that reads `ids` (at least one). Raises ContextError if they do not fit the
        model's trained context, and SettingError if the settings do not fit, or a token is not in
        the vocabulary."""
        model, oom_policy, before = context.model, context.oom_policy, context.cache.seen
        settings = config.settings
        _require_known(ids, model.shape.vocab, "token", "encode the text with its own tokenizer")
        if biased := [*config.logit_bias]:
            _require_known(biased, model.shape.vocab, "--logit-bias: token", "leave it out")
        seen = before + len(ids)
        most, reserved = model.shape.max_context, settings.planned_tokens if answers else 0
        if seen >= most + (not answers):
            raise _too_long(before, len(ids), reserved, most, settings)
        limit = settings.longest_within(most - seen) if answers else 0
        planned = min(reserved, limit)
        method = config.method.fitted(model.shape, model.calibration)
        bits, itemsize = _fewer(config.kv_bits, oom_policy), model.dtype.itemsize
        given = model.shape, method, seen, planned, itemsize, bits, limit
        budget = config.budget.resolve(*given)
        least = min(budget, config.budget.floor.resolve(*given))
        if times := oom_policy.times(BUDGET):
            fewest = max(method.min_budget, LEAST)
            budget = max(min(budget, seen) >> times, min(budget, fewest))
            least = min(least, budget)
        if budget < seen:
            require_budget(method, budget)
        limited_by: Literal["answer", "context"] = "context" if seen + limit == most else "answer"
        left_open = settings.kv_bits == AUTO and bits is None
        return cls(
            seen=seen,
            limit=limit,
            limited_by=limited_by,
            planned=planned,
            method=method,
            asked_bits=config.kv_bits,
            bits=bits,
            budget=budget,
            least=least,
            may_round=left_open and may_round(model.shape, method),
        )

    @property
    def loses(self) -> bool:
        """Whether the cache drops or rounds anything."""
        return loses(self.method, self.budget, self.seen, self.limit, self.bits)

    @property
    def drops(self) -> bool:
        """Whether it drops anything, or rounds because the user wants that: what a host store is
        for."""
        return loses(self.method, self.budget, self.seen, self.limit, self.asked_bits)

    @property
    def unfinished(self) -> str:
        """Why an answer that came to its limit is not what --schema asks for."""
        remedy = "raise --max-tokens" if self.limited_by == "answer" else "ask about less"
        return (
            f"the answer was cut at {self.limit:,} tokens, before it was what --schema asks for: "
            f"{remedy}"
        )

    def placed(
        self,
        config: EngineConfig,
        model: LoadedModel,
        store: HostKVStore | None,
        told: Collection[str],
    ) -> tuple[HostKVStore | None, list[str]]:
        """The host store if the turn needs it and there is room; and notes for the user, except
        those already `told`."""
        if not self.drops and not (store and store.begun):
            return None, []
        if store is None:
            recall = config.settings.recall
            if recall == "off" or not can_recall(self.method):
                return None, []
            gone = (
                f"--recall {recall} cannot begin now, since some of what was read before "
                "is gone: only a new conversation can recall"
            )
            return None, [] if gone in told else [gone]
        shape, itemsize = model.shape, model.dtype.itemsize
        needed = host_kv_bytes(shape, self.seen, self.planned, itemsize, store.bits)
        try:
            return store, place(config, store, needed)
        except RecallError as error:
            return None, [str(error)]


def _require_known(ids: list[int], vocab: int, called: str, remedy: str) -> None:
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab:
            raise SettingError(
                f"{called} {token} is not in this model's vocabulary of {vocab:,}: {remedy}"
            )


def can_compact(count: int, planned: int, limit: int) -> bool:
    """Whether `count` tokens and an answer as planned fit beside a compacted conversation, which
    takes half of the model's trained context."""
    return count + min(planned, limit // 4) <= limit // 2


def _too_long(
    before: int, count: int, planned: int, limit: int, settings: Settings
) -> ContextError:
    total = f"{before + count:,} tokens do not fit this model, which was trained for {limit:,}"
    if before and can_compact(count, planned, limit):
        return ContextError(
            f"{total}, and {before:,} of them were read before: let the conversation forget "
            "(--beyond-context compact), begin a new one, or use a model with a longer context "
            "(--model)",
            before + count,
        )
    kept = ""
    if settings.beyond_context == "compact":
        kept = " (--beyond-context compact forgets earlier messages, and no part of a new one)"
    return ContextError(
        f"{total}: ask about a part of the document, split it, or use a model with a longer "
        f"context (--model){kept}",
        before + count,
    )


def _fewer(bits: KVBits | None, oom_policy: OOMPolicy) -> KVBits | None:
    width = 4 if oom_policy.times(FOUR_BITS) else 8 if oom_policy.times(EIGHT_BITS) else 16
    held = 16 if bits is None else min(bits.keys, bits.values)
    return KVBits(width, width) if width < held else bits


def notes(model: LoadedModel, policies: list[LayerPolicy], seen: int) -> Iterator[str]:
    """What makes a turn slow, large or worse, in sentences; mostly none. `policies` are one a
    layer, `seen` counts this turn's tokens."""
    bits, passing = policies[0].bits, model.layers.passing
    if passing is not None:
        fastest = passing.bytes_per_s / passing.nbytes
        yield (
            f"--stream {passing.setting} brings {readable(passing.nbytes)} of weights to the "
            f"device for every token of the answer: at {readable(int(passing.bytes_per_s))}/s, "
            f"measured when the model was loaded, that allows {fastest:.3g} tokens/s at most"
        )
    if bits is not None:
        yield from _lossy(bits, model, seen)
        yield from _slow(bits, model, policies)


def _lossy(bits: KVBits, model: LoadedModel, seen: int) -> Iterator[str]:
    fewest = min(bits.keys, bits.values)
    if fewest > 4:
        return
    sides = [side for side, own in (("keys", bits.keys), ("values", bits.values)) if own <= 4]
    few, weights = f"{fewest}-bit {' and '.join(sides)}", sum(model.shape.parameters.values())
    if weights < SMALL_MODEL:
        yield (
            f"{few} cost models below 1 billion weights more than larger ones, and this one has "
            f"{weights / 1e9:.2f}: --kv-bits 8 costs nothing that was measured"
        )
    if seen > LONG:
        yield (
            f"{few} are reported to lose what long texts hold, and this one has {seen:,} tokens, "
            f"more than {LONG:,}: --kv-bits 8 is safer"
        )


def _slow(bits: KVBits, model: LoadedModel, policies: list[LayerPolicy]) -> Iterator[str]:
    masked = next((policy.method.name for policy in policies if policy.mask is not None), None)
    merged = next((policy.method.name for policy in policies if policy.partner is not None), None)
    if masked:
        yield f"{masked} restores a quantized layer for every token, which is slow"
    if merged:
        yield f"{merged} leaves entries exact in its paired layers until it merges them"
    if lacking(model.device) == "numba":
        yield (
            "numba is not installed, so an answer from quantized entries takes longer than from "
            "exact ones: pip install numba"
        )
    if model.device.type != "cuda":
        return
    if find_spec("triton") is None:
        yield (
            "triton is not installed, so quantized entries are attended to in many small steps, "
            "which is slow: pip install triton"
        )
        return
    what = merged if bits.has_kernels else f"--kv-bits {bits}"
    if model.shape.head_dim > WIDEST:
        what = f"attention over {model.shape.head_dim} channels"
    if what:
        yield f"{what} has no kernel: its entries are attended to in many small steps"
