"""What a PDF's pages hold besides the text drawn on them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvlite.documents.following import Following

if TYPE_CHECKING:
    from pypdf import PageObject, PdfReader

_HIDDEN_FLAG, _PASSWORD_FLAG = 1 << 1, 1 << 13
# They open something, or are read where they belong.
_NO_NOTES = frozenset(("/Link", "/Popup", "/Widget", "/FileAttachment"))
# How deep a form's fields may stand in each other.
_DEEP = 20


class Pictures:
    """The pictures of a document, told by what draws them; each counts once."""

    def __init__(self, following: Following) -> None:
        self.following = following
        self._seen = set[Any]()
        self._named = dict[str, Any]()
        self._of_page = 0
        self._drawn = 0

    def begin(self, page: "PageObject") -> None:
        """Begin another page."""
        self._named, self._of_page, self._drawn = {}, 0, 0
        resources = _resolved(page.get("/Resources"))
        held = _resolved(resources.get("/XObject")) if isinstance(resources, dict) else None
        if isinstance(held, dict):
            self._named = {str(name): dict.__getitem__(held, name) for name in held}

    def drawn(self, operator: bytes, operands: Any, *_: object) -> None:
        """Take an operation; every one, for it may be the last.

        Raises:
            Stopped: someone cancelled.
        """
        self.following.check()
        if operator == b"INLINE IMAGE":
            self._drawn += 1
            self._of_page += 1
        elif operator == b"Do" and operands and (name := str(operands[0])) in self._named:
            raw = self._named[name]
            found = _resolved(raw)
            if isinstance(found, dict) and found.get("/Subtype") == "/Image":
                self._drawn += 1
                key = getattr(raw, "idnum", None) or id(found)
                self._of_page += key not in self._seen
                self._seen.add(key)

    def end(self, text: str) -> None:
        """End a page that has this text."""
        if self._drawn and not text.strip():
            self.following.not_read["scanned page"] += 1
        else:
            self.following.not_read["picture"] += self._of_page


def beside(page: "PageObject", following: Following) -> Iterator[str]:
    """Filled-in fields and notes of a page, a line each."""
    every = _resolved(page.get("/Annots"))
    for raw in every if isinstance(every, list) else ():
        following.check()
        each = _resolved(raw)
        if not isinstance(each, dict) or _number(each.get("/F")) & _HIDDEN_FLAG:
            continue
        kind = each.get("/Subtype")
        if kind == "/FileAttachment":
            following.not_read["embedded file"] += 1
        said = _field(each) if kind == "/Widget" else _note(each) if kind not in _NO_NOTES else ""
        if said:
            yield said


def count_attached(reader: "PdfReader", following: Following) -> None:
    """Count files in a file, and forms that only some programs can show."""
    names = _resolved(reader.root_object.get("/Names"))
    if isinstance(names, dict) and "/EmbeddedFiles" in names:
        following.not_read["embedded file"] += len(reader.attachments)
    form = _resolved(reader.root_object.get("/AcroForm"))
    if isinstance(form, dict) and "/XFA" in form:
        following.not_read["XFA form"] += 1


def _resolved(value: Any) -> Any:
    return None if value is None else value.get_object()


def _number(value: Any) -> int:
    found = _resolved(value)
    return int(found) if isinstance(found, int) else 0


def _words(value: Any) -> str:
    """A value in one line; a name without its slash."""
    found = _resolved(value)
    if isinstance(found, list):
        return ", ".join(filter(None, map(_words, found)))
    if not isinstance(found, str):
        return ""
    return " ".join(found.removeprefix("/").split())


def _note(annotation: Any) -> str:
    said, by = _words(annotation.get("/Contents")), _words(annotation.get("/T"))
    return f"[Note by {by}: {said}]" if said and by else f"[Note: {said}]" if said else ""


def _field(widget: Any) -> str:
    """A field's name and value, of which either may stand in a field that it is part of."""
    names, value, flags = list[str](), "", 0
    at: Any = widget
    for _ in range(_DEEP):
        names += [own] if (own := _words(at.get("/T"))) else []
        value = value or _words(at.get("/V"))
        flags = flags or _number(at.get("/Ff"))
        at = _resolved(at.get("/Parent"))
        if not isinstance(at, dict):
            break
    if not value or value == "Off" or flags & _PASSWORD_FLAG:
        return ""
    name = _words(widget.get("/TU")) or ".".join(reversed(names))
    return f"[{name}: {value}]" if name else f"[{value}]"
