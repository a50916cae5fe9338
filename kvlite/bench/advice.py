"""Which settings to go on with, and which to recommend, from what many choices lost on parts of a
document."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Any, ClassVar

from kvlite.bench.fork import Choice
from kvlite.bench.rows import Key, QualityRow, Tally, tallies
from kvlite.config.settings import Settings
from kvlite.config.units import readable
from kvlite.methods import parse_method

KINDS = ("fact", "passage")
# Every third part has no say in the choice: it checks it.
_CHECKS = 3


@dataclass(frozen=True, kw_only=True)
class TuneRow(QualityRow):
    """One part of the document as one choice has kept it.

    Attributes:
        kind: "fact", hidden in the document and asked for after that was read and cut, or
            "passage", the text that follows what was read.
        part: which one of its kind.
        lost: nats a token by which it does worse than the full cache: by which a fact's number is
            more of a surprise, or KL divergence of a passage's predictions.
        known: of a fact, whether its number was likelier than not; of a passage, the share of
            tokens whose likeliest is the full cache's.
        ms: median milliseconds for a token of an answer; of passages 0.
    """

    KEY: ClassVar = ("kind", "part", "method", "budget", "kv_bits", "recall")
    BOUNDS: ClassVar = {"lost": (0, inf)}

    kind: str
    part: int
    lost: float
    known: float
    ms: float = 0


@dataclass(frozen=True)
class Advice:
    """Settings that are recommended.

    Attributes:
        values: by name, as a profile has them.
        reason: why, in words.
    """

    values: Mapping[str, Any]
    reason: str


def lost(rows: Sequence[TuneRow]) -> float:
    """Nats a token lost beside the full cache: the mean of what facts and passages lose."""
    by_kind: dict[str, list[float]] = {}
    for row in rows:
        by_kind.setdefault(row.kind, []).append(row.lost)
    return fmean(map(fmean, by_kind.values()))


def facts_known(rows: Sequence[TuneRow]) -> str:
    """`5 of 6`."""
    known = [row.known for row in rows if row.kind == "fact"]
    return f"{sum(known):.0f} of {len(known)}"


def shown_share(tally: Tally[TuneRow]) -> str:
    """The budget as a share of what was read."""
    row = tally.rows[0]
    return "all" if row.budget >= row.length else f"{row.budget / row.length:.0%}"


def frontier(found: Sequence[Tally[TuneRow]]) -> list[Tally[TuneRow]]:
    """What no other beats both in bytes and in what it loses, by bytes."""
    best: list[Tally[TuneRow]] = []
    for each in sorted(found, key=lambda tally: (tally.kv_bytes, lost(tally.rows))):
        if not best or lost(each.rows) < lost(best[-1].rows):
            best.append(each)
    return best


def in_race(rows: Sequence[TuneRow], choices: Sequence[Choice]) -> list[Choice]:
    """The choices to go on with, once some parts are measured: successive halving (Jamieson and
    Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", section 2).

    After each part that has a say, the half goes that loses most beside the best with no more
    bytes. What nothing beats stays, and so do the full cache and the default settings, which others
    are compared with.
    """
    left, part = [*choices], 0
    while left and _measured(rows, part, left):
        if not _checks(part):
            own = {_setting_of(choice) for choice in left}
            seen = (row for row in rows if row.part <= part and not _checks(row.part))
            found = _by_setting(row for row in seen if _setting(row) in own)
            left = _better_half(found, left, choices)
        part += 1
    return left


def comparable(rows: Sequence[TuneRow], choices: Sequence[Choice]) -> list[TuneRow]:
    """Rows of the choices in the race, of what all of them have read: a run may stop in between."""
    left = {_setting_of(choice) for choice in in_race(rows, choices)}
    own = [row for row in rows if _setting(row) in left]
    count = Counter((row.kind, row.part) for row in own)
    return [row for row in own if count[row.kind, row.part] == len(left)]


def advise(rows: Sequence[TuneRow], choices: Sequence[Choice], most_lost: float) -> Advice | None:
    """Recommend the fewest bytes that lose little enough, or what loses least.

    Every third part has no say in that. On these, what is recommended loses no more than the
    default settings with as many bytes; else the next best is.

    Args:
        choices: what was compared.
        most_lost: nats a token.

    Returns:
        None if there is no part that every choice in the race has read.
    """
    whole = comparable(rows, choices)
    tuning = _by_setting(row for row in whole if not _checks(row.part))
    held_back = _by_setting(row for row in whole if _checks(row.part))
    if not tuning:
        return None
    by_setting = {_setting_of(choice): choice for choice in choices}
    full = next(each for key, each in tuning.items() if by_setting[key].is_full)
    defaults = [each for key, each in tuning.items() if _is_default(by_setting[key], choices)]

    def rank(key: Key) -> tuple[float, float]:
        return max(most_lost, lost(tuning[key].rows)), tuning[key].kv_bytes

    for key in sorted(tuning, key=rank):
        each, choice = tuning[key], by_setting[key]
        beside = [rival for rival in defaults if rival.kv_bytes <= each.kv_bytes]
        rival = max(beside, key=lambda tally: tally.kv_bytes, default=None)
        check = " No part was left to check that: given more time, it goes on."
        if held_back:
            own = lost(held_back[key].rows)
            beside_it = "and the default method takes more bytes at every budget measured."
            if rival is not None:
                other = lost(held_back[_setting(rival.rows[0])].rows)
                if own > other:
                    continue
                beside_it = f"and the default method with no more bytes {other:.3f}."
            check = f" On parts that had no say in this it loses {own:.3f}, {beside_it}"
        return Advice(_values(choice, each.rows[0].length), _reason(each, full, most_lost) + check)
    raise AssertionError("the default is no worse than itself")


def _setting(row: TuneRow) -> Key:
    return row.method, row.budget, row.kv_bits, row.recall


def _by_setting(rows: Iterable[TuneRow]) -> dict[Key, Tally[TuneRow]]:
    return {_setting(each.rows[0]): each for each in tallies(rows)}


def _setting_of(choice: Choice) -> Key:
    return tuple(choice.columns.values())


def _checks(part: int) -> bool:
    """Whether it has no say in the choice."""
    return part % _CHECKS == _CHECKS - 1


def _measured(rows: Sequence[TuneRow], part: int, choices: Sequence[Choice]) -> bool:
    found = {(row.kind, *_setting(row)) for row in rows if row.part == part}
    return all((kind, *_setting_of(choice)) in found for kind in KINDS for choice in choices)


def _better_half(
    found: Mapping[Key, Tally[TuneRow]], left: Sequence[Choice], choices: Sequence[Choice]
) -> list[Choice]:
    """Choices without those that lose most beside the best with no more bytes."""
    behind = {
        key: lost(each.rows)
        - min(lost(other.rows) for other in found.values() if other.kv_bytes <= each.kv_bytes)
        for key, each in found.items()
    }
    stay = [
        each
        for each in left
        if each.is_full or _is_default(each, choices) or not behind[_setting_of(each)]
    ]
    others = [each for each in left if each not in stay]
    others.sort(key=lambda each: behind[_setting_of(each)])
    return [*stay, *others[: max(0, (len(left) + 1) // 2 - len(stay))]]


def _is_default(choice: Choice, choices: Sequence[Choice]) -> bool:
    """Whether it is the default at some budget, with the default recall if that was measured."""
    method = parse_method(Settings.method).name
    usual = str(Settings.recall_entries)
    measured = any(each.recalls == usual for each in choices if each.method.name == method)
    alike = choice.recalls == usual or not measured
    return choice.method.name == method and choice.bits is None and alike


def _values(choice: Choice, length: int) -> dict[str, Any]:
    """A choice as settings; what recalls does so wherever there is room."""
    values = choice.settings
    if choice.budget < length:
        values["budget"] = f"{100 * choice.budget / length:.2g}%"
    else:
        del values["budget"]
    if choice.recall is not None:
        values["recall"] = Settings.recall
    return values


def _reason(best: Tally[TuneRow], full: Tally[TuneRow], most_lost: float) -> str:
    row, loses = best.rows[0], lost(best.rows)
    kept = "everything" if best is full else f"{shown_share(best)} of the entries"
    rank = (
        "nothing smaller loses so little"
        if loses <= most_lost
        else f"nothing loses less, though {most_lost:g} was asked for"
    )
    return (
        f"{best.label}, keeps {kept}: {readable(best.kv_bytes)} for {row.length:,} tokens, where "
        f"the full cache takes {readable(full.kv_bytes)}. It knows {facts_known(best.rows)} hidden "
        f"facts (the full cache {facts_known(full.rows)}) and loses {loses:.3f} nats a token: "
        f"{rank}."
    )
