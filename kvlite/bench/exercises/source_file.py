"""A long file of Python, for exercises on code."""

from dataclasses import dataclass
from operator import attrgetter

from kvlite.bench.exercises.exercise import Material
from kvlite.bench.prose import names

_WORDS = """batch_size depth offset stride width height margin retries timeout_s seed scale
threshold window overlap rate channels bias momentum decay patience tolerance capacity priority
quota"""


@dataclass(frozen=True)
class Function:
    """One function of the file.

    Attributes:
        limit: a number of its own.
        limit_line: the line that has it, as no other function has.
    """

    name: str
    parameters: tuple[str, ...]
    limit: int
    limit_line: str
    text: str


def functions(material: Material, beside: str) -> list[Function]:
    """As many functions as fit beside a text, with names and parameters of their own."""
    random, words = material.random, _WORDS.split()
    called = [name.replace(" ", "_") for name in names(random, 2000)]
    limits = random.sample(range(100, 10_000), 2000)

    def part(number: int) -> Function:
        name, limit = called[number], limits[number]
        first, second, third = parameters = tuple(random.sample(words, 3))
        line = f"    limit_of_{name} = {limit} + {third}"
        text = (
            f"def {name}({', '.join(parameters)}):\n"
            f"    {random.choice(('total', 'count', 'level'))} = {first} + {second}\n"
            f"{line}\n"
            f"    return min({first}, limit_of_{name})\n"
        )
        return Function(name, parameters, limit, line, text)

    return material.parts(part, attrgetter("text"), beside)


def source(known: list[Function]) -> str:
    """The file."""
    return "\n\n".join(each.text for each in known)
