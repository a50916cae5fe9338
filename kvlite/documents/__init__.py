"""Files people have (text, PDF, Word, slides, workbooks, books, mail) as text with page numbers.

Whatever is wrong with a file becomes one `DocumentError` that names the file and the remedy.
Parsers are imported where they are used: together they take half a second, and most runs of kvlite
need none of them.
"""

from kvlite.documents.document import Document, whole_characters
from kvlite.documents.opening import require_readable
from kvlite.documents.reading import read_document

__all__ = ["Document", "read_document", "require_readable", "whole_characters"]
