"""Text of models and files, for a terminal that obeys control characters."""

import re

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    """The text without anything a terminal would obey but tabs and ends of lines."""
    return _CONTROLS.sub("\ufffd", text.replace("\r\n", "\n"))
