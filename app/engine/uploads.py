"""Documents that were uploaded: nothing else of this machine is read for anyone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradio.utils import get_upload_folder

from kvlite.documents import Document, read_document
from kvlite.errors import DocumentError

from .work import Work

# What may be uploaded.
SUFFIXES = (".pdf", ".docx", ".txt", ".md", ".markdown", ".html", ".htm")


def read_upload(path: str, work: Work) -> Document:
    """The document of an uploaded file.

    Args:
        work: shows how far it is, and may be cancelled.

    Raises:
        DocumentError: it cannot be read; the file is called what its owner calls it.
        Stopped: someone wanted no more of it.
    """
    name = Path(path).name
    if Path(path).suffix.lower() not in SUFFIXES:
        raise DocumentError(f"{name} is none of {', '.join(SUFFIXES)}: save it as one of them")
    work.begin(f"Opening {name}")
    try:
        return read_document(path, progress=work.progress, cancel=work.cancel)
    except DocumentError as error:
        raise DocumentError(str(error).replace(path, name)) from None


def uploaded(file: Any) -> str:
    """Where a file lies that a program names, as gradio's client does once it has uploaded it.

    Raises:
        DocumentError: it names none that was uploaded.
    """
    path = file.get("path") if isinstance(file, Mapping) else None
    if isinstance(path, str) and "\0" not in path:
        place, folder = Path(path).resolve(), Path(get_upload_folder()).resolve()
        if place.is_relative_to(folder) and place.is_file():
            return str(place)
    raise DocumentError("this is no file that was uploaded: give handle_file(PATH)")
