"""A document read in a process of its own: for files that others send, and for who may not wait."""

import threading

from kvlite.config.child_process import run_in_child
from kvlite.documents.document import Document
from kvlite.documents.following import Told
from kvlite.documents.reading import read_document, too_large_for_memory

# Bytes beyond what Python takes, ten times the largest file.
_MEMORY = 2 * 2**30


def read_apart(
    path: str,
    *,
    limit: int | None = None,
    progress: Told | None = None,
    cancel: threading.Event | None = None,
) -> Document:
    """Read a file as `read_document` does, whose args and errors these are, so that it is stopped
    at once wherever it is, and takes no more memory than any document needs. Standard input is
    this process's own, and read here.
    """
    if path == "-":
        return read_document(path, limit=limit, progress=progress, cancel=cancel)
    try:
        return run_in_child(
            read_document, path, limit=limit, progress=progress, cancel=cancel, memory=_MEMORY
        )
    except MemoryError as error:
        raise too_large_for_memory(path) from error
