"""Files people have (text, Markdown, HTML, PDF, Word) as text that remembers its pages.

Whatever is wrong with a file ends as one `DocumentError` that names the file and the remedy. The
parsers are imported where they are used: together they cost half a second, and most runs of
kvlite need none of them.
"""

from kvlite.documents.apart import read_apart
from kvlite.documents.document import Document, whole_characters
from kvlite.documents.opening import require_readable
from kvlite.documents.reading import read_document

__all__ = ["Document", "read_apart", "read_document", "require_readable", "whole_characters"]
