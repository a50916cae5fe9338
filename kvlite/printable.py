"""Text of models, files and users, for a terminal that obeys control characters."""

import re

# C0 but tabs and ends of lines, DEL and C1; ends of lines and paragraphs that are none to others;
# embeddings, overrides and isolates of right-to-left text, which show one name for another, and
# what Unicode deprecates. Marks that letters are joined and ordered by are left alone.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u206f\ufff9-\ufffb]"
)


def harmless(text: str) -> str:
    """The text without anything a terminal would obey but tabs and ends of lines."""
    return _CONTROLS.sub("\ufffd", text.replace("\r\n", "\n"))


def escaped(text: str) -> str:
    """A JSON text that says the same without such characters."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
