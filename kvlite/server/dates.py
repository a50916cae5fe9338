"""What in a text says which day or time it is now: "Current time: 14:03", "Today's date is
2026-11-29".

A date alone says nothing: it may be that of a deadline. So a label has to say what it is, right
before it; those that may mean something else too ("Date:") have to have a line, or the beginning of
a sentence, for themselves.
"""

import re

_WEEKDAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b"
_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|"
    r"Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\b\.?"
)
_DAY, _YEAR = r"\d{1,2}(?:st|nd|rd|th)?\b", r"(?:19|20)\d\d\b"
_ZONE = (
    r"(?-i:(?:UTC|GMT)?[+-]\d\d:?\d\d\b|(?:UTC|GMT)[+-]\d{1,2}(?::\d\d)?\b|[A-Z][a-z]+/[A-Z]\w+|Z\b|"
    r"(?:UTC|GMT|BST|WES?T|CES?T|EES?T|MSK|IST|JST|KST|HKT|SGT|AE[SD]T|NZ[SD]T|[ECMP][SD]T)\b)"
)
_TIME = (
    r"(?:\d{1,2}:\d\d(?::\d\d(?:[.,]\d{1,9})?)?(?!\d)(?:\s?[ap]\.?m\b\.?)?|\d{1,2}\s?[ap]m\b)"
    rf"(?:[ ,(]{{0,2}}{_ZONE}\)?){{0,3}}"
)
_DATE = (
    rf"(?:{_WEEKDAY},? (?:the )?)?"
    r"(?:\d{4}-\d\d-\d\d(?!\d)|\d{1,2}/\d{1,2}/(?:\d{4}|\d\d)\b|\d{4}/\d{1,2}/\d{1,2}\b|"
    rf"\d{{1,2}}\.\d{{1,2}}\.{_YEAR}|{_MONTH} {_DAY}(?:,? {_YEAR})?|"
    rf"{_DAY}(?: of)? {_MONTH}(?:,? {_YEAR})?)"
)
_THEN = r"(?:,? |\s?[-\u2013|(]\s?)"
_VALUE = (
    rf"(?:{_WEEKDAY} {_MONTH} +\d{{1,2}} {_TIME} {_YEAR}|"  # as the program `date` writes it
    rf"{_DATE}(?:(?:T|,? at |{_THEN}){_TIME})?|{_TIME}(?:(?:,? on |{_THEN}){_DATE})?|"
    rf"{_WEEKDAY}(?:(?:,? at |,? ){_TIME})?|1[6-9]\d{{8}}(?:\d{{3}})?\b)"  # seconds since 1970
)
# Labels, and what may stand between one and its value.
_NOUN = r"(?:date|time|day|timestamp)(?:[\s_/&-]{0,3}(?:and[\s_])?(?:time|date))?\b"
_OF = r"(?:(?:local|system|utc|server|user|calendar)[\s_-]{0,3})?"
_WHERE = r"(?:\s?\([^)\n]{0,40}\)|\s(?:in|for)\b(?: ISO 8601)?[^\d\n]{0,60}?)?"
_TO = r"""[\s:=>"'*`|_-]{0,9}(?:\bis\b(?: now| currently)?)?[\s:=>"'*`|_-]{0,9}"""
_NOW = re.compile(
    rf"(?:\bcurrent[\s_-]{{0,3}}{_OF}{_NOUN}|\btoday(?:['\u2019]s)?[\s_-]{{0,3}}(?:date|day)\b)"
    rf"{_WHERE}{_TO}({_VALUE})"
    # A sentence of its own.
    r"|(?:^|[.!?] )[^\w\n]{0,9}"
    rf"(?:(?:the {_OF}{_NOUN}|today|it|now it) is(?: now| currently)?|it['\u2019]s(?: now)?)"
    rf" ({_VALUE})"
    # A line of its own.
    rf"|^[^\w\n]{{0,9}}(?:(?:the )?{_OF}{_NOUN}|today|now|clock){_WHERE}{_TO}({_VALUE})"
    r"(?=[^\w\n]{0,9}(?:</\w+>)?\s?$)",
    re.IGNORECASE | re.MULTILINE,
)


def places_of_now(text: str) -> list[tuple[int, int]]:
    """Where a text has dates and times that it says to be now: from which character to which."""
    return [found.span(found.lastindex or 0) for found in _NOW.finditer(text)]
