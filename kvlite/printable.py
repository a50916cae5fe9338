"""Text from outside, made safe for terminals, which obey control characters."""

import re

# C0 except tab and newline, DEL and C1; Unicode's line and paragraph separators; bidirectional
# embeddings, overrides and isolates, which can disguise a name; deprecated format characters.
# Joiners and the marks that order letters are left alone.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u206f\ufff9-\ufffb]"
)


def harmless(text: str) -> str:
    """Replace control characters, except tabs and line ends, with a replacement character."""
    return _CONTROLS.sub("\ufffd", text.replace("\r\n", "\n"))


def escaped(text: str) -> str:
    """The same JSON text, with control characters escaped."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
