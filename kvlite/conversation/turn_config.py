"""What a turn's settings come to, checked and decided before anything of it is read."""

from collections.abc import Collection
from dataclasses import dataclass

from kvlite.cache import KVBits, parse_kv_bits
from kvlite.config.settings import Settings
from kvlite.engine.oom_actions import LEAST
from kvlite.errors import ContextError, RecallError, SettingError
from kvlite.memory.oom import BUDGET, EIGHT_BITS, FOUR_BITS, Ladder
from kvlite.methods.base import Method
from kvlite.methods.budget import method_and_amount
from kvlite.methods.layer_policy import can_recall, loses
from kvlite.model.load import LoadedModel
from kvlite.offload import Tier
from kvlite.offload.kv.placement import place, tier_bytes


@dataclass(frozen=True)
class Terms:
    """What a turn's settings come to.

    Attributes:
        seen: tokens, once it is read.
        longest: tokens that its answer may have.
        method: fitted to the model.
        bits: of keys and values; None for as they are.
        budget: mean entries a KV head and layer.
        loses: whether the cache drops or rounds something.
    """

    seen: int
    longest: int
    method: Method
    bits: KVBits | None
    budget: int
    loses: bool

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        before: int,
        ids: list[int],
        settings: Settings,
        ladder: Ladder,
        *,
        answers: bool,
    ) -> "Terms":
        """What they come to for `ids`, at least one token.

        Args:
            before: tokens that were seen before.
            ladder: what was given up so far.
            answers: whether an answer will follow.

        Raises:
            ContextError: they do not fit the model's trained context.
            SettingError: the settings do not fit, or a token is not in the vocabulary.
        """
        _require_known(ids, model.shape.vocab)
        seen = before + len(ids)
        wanted, most = settings.max_new_tokens if answers else 0, model.shape.max_context
        if seen >= most + (wanted == 0):
            raise _too_long(before, len(ids), wanted, most, settings)
        longest = min(wanted, most - seen)
        method, amount = method_and_amount(settings.method, settings.budget)
        method = method.fitted(model.shape, model.calibration)
        bits = _fewer(parse_kv_bits(settings.kv_bits), ladder)
        budget = amount.resolve(model.shape, method, seen, longest, model.dtype.itemsize, bits)
        if times := ladder.times(BUDGET):
            least = max(method.least_budget, LEAST)
            budget = max(min(budget, seen) >> times, min(budget, least))
        if budget < seen:
            method.check(budget)
        return cls(seen, longest, method, bits, budget, loses(method, budget, seen, longest, bits))


def tier_in_effect(
    tier: Tier | None,
    model: LoadedModel,
    settings: Settings,
    terms: Terms,
    told: Collection[str],
) -> tuple[Tier | None, list[str]]:
    """The tier, unless a turn loses nothing, or it cannot be; then what the user is told.

    Args:
        told: sentences that need not be said again.
    """
    if not terms.loses and not (tier and tier.begun):
        return None, []
    if tier is None:
        if settings.recall == "off" or not can_recall(terms.method):
            return None, []
        gone = (
            f"--recall {settings.recall} cannot begin now, since some of what was read before "
            "is gone: only a new conversation can recall"
        )
        return None, [] if gone in told else [gone]
    itemsize = model.dtype.itemsize
    needed = tier_bytes(model.shape, terms.seen, terms.longest, itemsize, tier.bits)
    try:
        tier.disk, tier.spare, said = place(settings, tier, needed)
    except RecallError as error:
        return None, [str(error)]
    return tier, said


def _require_known(ids: list[int], vocab: int) -> None:
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab:
            raise SettingError(
                f"token {token} is not in this model's vocabulary of {vocab:,}: encode the "
                "text with its own tokenizer"
            )


def can_compact(count: int, longest: int, limit: int) -> bool:
    """Whether so many tokens and an answer fit beside what is kept of a conversation that is moved
    together: half of the model's trained context."""
    return count + min(longest, limit // 4) <= limit // 2


def _too_long(
    before: int, count: int, longest: int, limit: int, settings: Settings
) -> ContextError:
    """What is wrong with `count` tokens more, and what helps."""
    total = f"{before + count:,} tokens do not fit this model, which was trained for {limit:,}"
    if before and can_compact(count, longest, limit):
        return ContextError(
            f"{total}, and {before:,} of them were read before: let the conversation forget "
            "(--beyond-context compact), begin a new one, or use a model with a longer context "
            "(--model)"
        )
    kept = ""
    if settings.beyond_context == "compact":
        kept = " (--beyond-context compact forgets earlier messages, and no part of a new one)"
    return ContextError(
        f"{total}: ask about a part of the document, split it, or use a model with a longer "
        f"context (--model){kept}"
    )


def _fewer(bits: KVBits | None, ladder: Ladder) -> KVBits | None:
    """What the user asked for, or what the conversation had to be content with."""
    width = 4 if ladder.times(FOUR_BITS) else 8 if ladder.times(EIGHT_BITS) else 16
    held = 16 if bits is None else min(bits.keys, bits.values)
    return KVBits(width, width) if width < held else bits
