"""Makes plans, and fills in the settings that were left open."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from threading import Event
from typing import Any

from kvlite.cache.bits import AUTO, UNCHANGED, KVBits
from kvlite.config.units import readable
from kvlite.engine.mtp import beside_bytes
from kvlite.engine.prefill import CHUNK
from kvlite.errors import require_uncancelled
from kvlite.memory.device_budget import DeviceBudget
from kvlite.methods.budget import Budget
from kvlite.methods.engine_config import EngineConfig
from kvlite.model.chat_template import tokens_of
from kvlite.model.mtp import empty_mtp, has_mtp, mtp_bytes
from kvlite.model.weights import Weights, held_tensors
from kvlite.offload.weights.experts import LEAST, Resident
from kvlite.planner.cards import CardPlan, over_cards
from kvlite.planner.ceiling import EIGHT, may_round, what_fits
from kvlite.planner.choice import Choice
from kvlite.planner.forecaster import Forecaster
from kvlite.planner.held_weights import HeldWeights
from kvlite.planner.peaks import Forecast
from kvlite.planner.plan import Plan

CHUNKS = CHUNK, 512, 256, 128
PCIE = 25e9  # bytes a second


class Planner:
    """Makes plans for one model on one device."""

    def __init__(
        self,
        forecaster: Forecaster,
        room: DeviceBudget,
        config: EngineConfig,
        load_options: Sequence[tuple[str, Weights]],
        in_files: int = 0,
        cancel: Event | None = None,
    ) -> None:
        """Plan for some settings, and choose those left open.

        Args:
            load_options: where the model's layers may stay and what it may be loaded as, the best
                first.
            in_files: bytes of the model's files, which a quantized checkpoint takes in memory, too.
            cancel: set to end a plan that is being made, which raises Stopped.
        """
        self.forecaster = forecaster
        self.shape = forecaster.shape
        self.room = room
        self.config = config
        self.settings = config.settings
        self.method = config.method
        self.load_options = list(load_options)
        self.held = HeldWeights(
            self.shape, in_files, on_cpu=room.kind == "cpu", by_layer=bool(room.cards)
        )
        self.cancel = cancel
        self.known: dict[Any, Forecast] = {}

    def tokens_of(self, text: str) -> int | None:
        """Tokens of a text; None without the model's tokenizer."""
        tokenizer = self.forecaster.tokenizer
        return tokens_of(tokenizer, text, 4 * len(text)) if tokenizer else None

    def plan(self, choice: Choice, tokens: int, resident: Resident = LEAST) -> Plan:
        """The plan of a choice for that many tokens, without reasons."""
        held = self.held.on_device(choice.weights, choice.stream, resident)
        made = self.forecast(choice, tokens)
        return Plan(
            model=self.settings.model,
            room=self.room,
            choice=choice,
            tokens=tokens,
            longest=self._longest(tokens),
            kept=min(tokens, self._entries(choice, tokens)),
            weights=held,
            passing=self.held.passing(choice.weights),
            forecast=made,
            reasons=(),
            tokens_per_s=self._ceiling(choice, held, made, resident),
            resident=resident,
            cards=self.over_cards(choice, held, *made.by_layer),
        )

    def over_cards(
        self, choice: Choice, held: dict[str, int], kv: Sequence[int], work: int
    ) -> tuple[CardPlan, ...]:
        """What each card takes, if there are several.

        Args:
            held: bytes of weights, by group.
            kv, work: as of `Forecast.by_layer`.
        """
        if not self.room.cards:
            return ()
        modules = self.forecaster.model(choice.weights).layers
        shares = [sum(each.nbytes for each in held_tensors(module)) for module in modules]
        first = held["embedding"] + held["head"]
        of_layers = sum(held.values()) - first
        weights = [of_layers * share // sum(shares) for share in shares]
        passing = self.held.passing(choice.weights)
        return over_cards(self.room.cards, weights, kv, first, work, passing)

    def forecast(self, choice: Choice, tokens: int) -> Forecast:
        """The forecast of a choice: everything but the weights."""
        streamed = choice.stream != "off"
        kind = self.forecaster.kind(choice.weights, streamed)
        key = kind, choice.given.budget, choice.given.kv_bits, choice.chunk, tokens
        if key not in self.known:
            require_uncancelled(self.cancel)
            self.known[key] = self.forecaster.first_turn(
                choice.given,
                choice.weights,
                chunk=choice.chunk,
                tokens=tokens,
                longest=self._longest(tokens),
                streamed=streamed,
            )
        return self.known[key]

    def _longest(self, tokens: int) -> int:
        """Tokens of an answer that are planned for, within the model's context."""
        return max(0, min(self.settings.planned_tokens, self.shape.max_context - tokens))

    def best(self, tokens: int) -> Plan:
        """The first choice that fits, or else the smallest.

        Quality has priority. A smaller chunk costs only a little time, a cache in 8 bits next to
        nothing. Then come as many entries as fit (recall fetches back what is needed), weights of 4
        bits and, last, streamed weights, which cost the most time.
        """
        plans: list[Plan] = []
        for stream, weights in self.load_options:
            plans.append(self._first_fit(list(self._choices(weights, stream)), tokens))
            if plans[-1].fits:
                break
        chosen = self._filled(min(plans, key=lambda plan: (not plan.fits, plan.peak_bytes)))
        mtp = self._mtp_bytes(chosen.choice.weights)
        headed = replace(chosen, mtp=mtp)
        made = headed if headed.fits else chosen
        made = replace(made, reasons=tuple(self._reasons(made)))
        return made.without_mtp(mtp) if made.fits and made.mtp < mtp else made

    def _mtp_bytes(self, weights: Weights) -> int:
        """Bytes of the model's own MTP head, if it has one that is wanted; else 0."""
        wanted = self.settings.speculate != "off" and weights.index is None and not self.room.cards
        if not wanted or not has_mtp(self.forecaster.config):
            return 0
        head = empty_mtp(self.forecaster.model(weights).module, weights.dtype)
        own = Weights("bf16", weights.dtype) if weights.stored else weights
        return mtp_bytes(head, own) + beside_bytes(self.shape, weights.dtype.itemsize)

    def _filled(self, plan: Plan) -> Plan:
        """The same with more of streamed layers on the device, where these have experts: half of
        what is left is for longer turns."""
        choice, spare = plan.choice, (plan.room.tensors - plan.peak_bytes) // 2
        if choice.stream == "off" or spare <= 0:
            return plan
        return self.plan(choice, plan.tokens, self.held.filling(choice.weights, spare))

    def _first_fit(self, choices: Sequence[Choice], tokens: int) -> Plan:
        """The first choice that fits; if none does, the last, which takes least."""
        usual = self.plan(choices[0], tokens)
        if usual.fits:
            return usual
        least = self.plan(choices[-1], tokens)
        if not least.fits:
            return least
        plans = (self.plan(choice, tokens) for choice in choices)
        return self._most_kept(next(plan for plan in plans if plan.fits), usual)

    def _most_kept(self, least: Plan, usual: Plan) -> Plan:
        """A plan with as many entries as fit, where it keeps the least that `auto` may."""
        choice, tokens = least.choice, least.tokens
        if choice.given.budget == self.config.budget:
            return least

        def plan(entries: int) -> Plan:
            given = replace(choice.given, budget=Budget(entries=entries))
            return self.plan(replace(choice, given=given), tokens)

        def missing(entries: int, _: KVBits | None) -> int:  # in the bits of the least
            return max(need - offered for need, offered in plan(entries).needs)

        most, fewest = (self._entries(each, tokens) for each in (usual.choice, choice))
        entries, _ = what_fits(missing, most, fewest, may_round=False)
        return plan(entries)

    def _entries(self, choice: Choice, tokens: int) -> int:
        """The mean entries of a KV head that a choice allows."""
        if not self.method.compresses:
            return tokens
        longest, given = self._longest(tokens), choice.given
        return self.forecaster.budget(given, choice.weights, tokens=tokens, longest=longest)

    @property
    def floor(self) -> Budget:
        """The budget that is left where memory is short."""
        return self.config.budget if self.settings.never_lossy else self.config.budget.floor

    def usual(self) -> Choice:
        """The choice if no plan can be made."""
        stream, weights = self.load_options[0]
        return next(self._choices(weights, stream))

    def _choices(self, weights: Weights, stream: str) -> Iterator[Choice]:
        """Values of the settings that were left open, the best first."""
        settings, config = self.settings, self.config
        bits = {UNCHANGED if settings.kv_bits == AUTO else settings.kv_bits: config.kv_bits}
        open_bits = settings.kv_bits == AUTO and not settings.never_lossy
        if open_bits and may_round(self.shape, self.method):
            bits |= {str(EIGHT): EIGHT}
        chunks = CHUNKS if settings.chunk is None else (settings.chunk,)
        kept = [(config.budget, *each) for each in bits.items()]
        if self.floor != config.budget and self.method.compresses:
            kept.append((self.floor, *next(iter(bits.items()))))
        for budget, width, packed in kept:
            given = replace(config, budget=budget, kv_bits=packed)
            for chunk in chunks:
                yield Choice(weights, stream, width, chunk, given)

    def _reasons(self, plan: Plan) -> Iterator[str]:
        yield from self._given_up(plan)
        weights = plan.choice.weights
        unpacked = {} if weights.index is None else weights.index.unpacked
        if unpacked:
            taken = weights.dtype.itemsize * sum(unpacked.values())
            yield (
                f"weights of type {', '.join(unpacked)} are unpacked while they are loaded, which "
                f"takes {readable(taken)}"
            )

    def _given_up(self, plan: Plan) -> Iterator[str]:
        settings, choice, offered = self.settings, plan.choice, plan.room.offered
        first = self.usual()
        usual = self.plan(first, plan.tokens)
        if usual.fits:
            yield f"everything fits: {readable(plan.peak_bytes)} of {offered}"
            return
        yield (
            f"with {first.weights.name} weights, a cache of {first.kv_bits} bits and chunks of "
            f"{first.chunk} tokens the peak would be {readable(usual.peak_bytes)}, more than "
            f"{offered}"
        )
        if settings.weights == "auto" and choice.weights != first.weights:
            saved = sum(usual.weights.values()) - plan.weight_bytes
            less = f", which takes {readable(saved)} less" if saved > 0 else ""
            yield f"weights are {choice.weights.name}{less}"
        if choice.stream != first.stream:
            where = "on disk" if choice.stream == "disk" else "in host memory"
            yield f"layers stay {where} and come to the device in turn, which is slow"
        if (of := self.held.experts) and choice.stream != "off":
            rest = "the rest of all layers" if plan.resident.layers else "two layers of the rest"
            yield (
                f"experts come as tokens are routed to them: {self.held.slots(plan.resident):,} of "
                f"{of:,} and {rest} are on the device"
            )
        if choice.kv_bits != first.kv_bits:
            yield f"the cache has {choice.kv_bits} bits a number"
        if choice.given.budget != first.given.budget:
            rest = "forgotten" if settings.recall == "off" else "recalled from host memory"
            yield (
                f"a KV head keeps {plan.kept:,} of {plan.tokens:,} entries, which is what fits; "
                f"the rest is {rest}"
            )
        if choice.chunk != first.chunk:
            yield f"{choice.chunk} tokens go through a layer together, which changes no answer"

    def _ceiling(
        self, choice: Choice, held: dict[str, int], made: Forecast, resident: Resident
    ) -> float | None:
        if self.room.bandwidth is None:
            return None
        read = self.held.for_a_token(choice.weights) - held["embedding"] * (held["head"] > 0)
        seconds = (read + made.answering.kv) / self.room.bandwidth
        if choice.stream != "off":
            seconds += self.held.brought(choice.weights, resident) / PCIE
        return 1 / seconds
