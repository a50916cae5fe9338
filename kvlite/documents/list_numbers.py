"""Numbers of lists, as they are written before their items."""

import re

_ROMANS = ((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"),
           (40, "xl"), (10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i"))  # fmt: skip
# The longest number such as "aaa".
_MOST_LETTERS = 20
_STYLE = re.compile(r"list-style(?:-type)?\s*:\s*(lower|upper)-(alpha|latin|roman)", re.I)


def form_of(style: str) -> str:
    """The form of `number_in` that a style in CSS asks for."""
    found = _STYLE.search(style)
    letter = "" if found is None else "i" if found[2].lower() == "roman" else "a"
    return letter.upper() if found is not None and found[1].lower() == "upper" else letter


def number_in(form: str, number: int) -> str:
    """A number in letters or Roman numerals, as lists write them.

    Args:
        form: as HTML's attribute `type`: a, A, i, I, or else digits.
    """
    written = str(number)
    if form in ("a", "A") and number > 0:
        repeats, letter = divmod(number - 1, 26)
        written = chr(ord("a") + letter) * min(repeats + 1, _MOST_LETTERS)
    elif form in ("i", "I") and 0 < number < 4000:
        written = ""
        for value, sign in _ROMANS:
            written += sign * (number // value)
            number %= value
    return written.upper() if form.isupper() else written
