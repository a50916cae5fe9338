"""Rich text (.rtf)."""

import re

from kvlite.documents.document import whole_characters
from kvlite.documents.tracker import Tracker

_NOT_READ = {"pict": "picture", "footnote": "footnote", "annotation": "comment"}


def rtf_text(data: bytes, tracker: Tracker) -> str:
    """The text of a file, a line for each row of a table. Pictures and footnotes
    are counted.

    Raises Stopped if someone cancelled.
    """
    from striprtf.striprtf import rtf_to_text

    tracker.check()
    markup = data.decode("latin-1")
    for word, what in _NOT_READ.items():
        tracker.not_read[what] += len(re.findall(rf"\\{word}\b", markup))
    text = str(rtf_to_text(markup, errors="replace"))  # type: ignore[no-untyped-call]
    text = whole_characters(text)  # the halves of those beyond the first 65,536 come one by one
    return re.sub(r"( \|\s*)+\n", "\n", re.sub(r"\n?\|", " | ", text))
