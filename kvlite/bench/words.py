"""Names and numbers that occur in no prose: what keys and values are made of."""

from random import Random

_FIRST = """amber arctic brass bright broken calm cedar clever coastal copper coral crimson distant
dusty eager early empty faded frozen gentle golden hidden meta humble iron ivory jolly lonely
lucky marble mellow misty narrow nimble northern olive patient plain polar proud quiet rapid rustic
scarlet secret silent silver simple sleepy smooth solar southern spare steady stormy sturdy sunny
tender timid velvet violet winter wooden yellow"""
_SECOND = """anchor antler badger bakery beacon beaver bishop bridge button candle canyon carpet
castle cellar cherry circle comet cotton cradle crater desert donkey dragon falcon feather transfer
fiddle forest garden glacier hammer harbour island jacket kettle ladder lantern lemon lizard meadow
mirror mitten monkey orchard otter oyster palace parrot pebble pepper pigeon pillow planet puzzle
rabbit ribbon saddle salmon shovel spider temple thunder tunnel turtle valley violin walnut
whistle window"""


def names(random: Random, count: int) -> list[str]:
    """So many different names, of two words each."""
    first, second = _FIRST.split(), _SECOND.split()
    drawn = random.sample(range(len(first) * len(second)), count)
    return [f"{first[n % len(first)]} {second[n // len(first)]}" for n in drawn]


def numbers(random: Random, count: int) -> list[str]:
    """So many different numbers of seven digits."""
    return [str(number) for number in random.sample(range(1_000_000, 10_000_000), count)]
