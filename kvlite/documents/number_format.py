"""Numbers of a workbook's cells by the codes of their formats."""

import re
from datetime import datetime, timedelta

# Codes of formats that have a number; East Asia's from 27 on.
BUILT_IN = {
    **dict.fromkeys((9, 10), "%"),
    **dict.fromkeys((*range(14, 18), *range(27, 32), 36, *range(50, 59)), "d"),
    **dict.fromkeys((*range(18, 22), *range(32, 36), 45), "h"),
    22: "d h",
    46: "[h]",
    47: "s.0",
}
# Text, colours and conditions.
_LITERAL = re.compile(r'"[^"]*"?|\\.|[_*].|\[(?!(?:h+|m+|s+)\])[^\]]*\]')
# A number with what stands before and after it; one that ends in a comma is shown in thousands.
_TEXT = r'(?:"[^"]*"|\\.|\[[^\]]*\]|[_*].|[-+ $\u00a3\u00a5\u20ac])*'
_PLAIN = re.compile(rf"({_TEXT})(General|[#0?](?:[#0?.,]*[#0?.])?)({_TEXT})(?:;.*)?", re.S)
_SAID = re.compile(r'"([^"]*)"|\\(.)|\[\$([^\]-]*)[^\]]*\]|[_*].|\[[^\]]*\]|(.)', re.S)
_YEAR_10000 = 2_958_466


def simplified(code: str) -> str:
    """What a format's code says of positive numbers; nothing if they are shown as they are."""
    bare = _LITERAL.sub("", code.lower()).partition(";")[0]
    if re.search("[%ydhms]", bare):
        return bare
    if not (found := _PLAIN.fullmatch(code)):
        return ""
    before, after = ("".join(map("".join, _SAID.findall(found[each]))) for each in (1, 3))
    width = len(found[2]) if set(found[2]) == {"0"} else 0
    return f"{before}\0{width}\0{after}" if before or after or width > 1 else ""


def formatted(number: float, code: str = "", *, since_1904: bool = False) -> str:
    """A number as a date, a time, a duration, in percent, with its unit, or else as it is stored.
    No digit is left out: formats that round are not followed.

    Args:
        code: that of its format, simplified.
        since_1904: whether days are counted from 1904 instead of 1900.
    """
    if "\0" in code:
        before, width, after = code.split("\0")
        sign = "-" * (number < 0)
        return f"{sign}{before}{formatted(abs(number)).zfill(int(width))}{after}".strip()
    if "%" in code:
        return f"{formatted(float(f'{number * 100:.15g}'))}%"
    if not code or not 0 <= number < _YEAR_10000:
        return str(int(number) if number.is_integer() else float(f"{number:.15g}"))
    step = 1 if ".0" in code else 1000
    passed = timedelta(milliseconds=round(number * 86_400_000 / step) * step)
    # Excel has a February 29 in 1900.
    first = datetime(1904, 1, 1) if since_1904 else datetime(1899, 12, 30 + (number < 60))
    moment = first + passed
    if "[" in code:
        return f"{passed // timedelta(hours=1)}{moment::%M:%S}"
    exact = "milliseconds" if moment.microsecond else "seconds" if moment.second else "minutes"
    clock = moment.time().isoformat(exact)
    if number < 1:
        return clock
    has_time = clock != "00:00" or re.search("[hs]", code)
    return f"{moment:%Y-%m-%d} {clock}" if has_time else f"{moment:%Y-%m-%d}"
