"""Documents that pandoc reads, in a process of its own that has limits of time and memory."""

import io
import re
import shutil
import subprocess
import zipfile
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import takewhile
from typing import Any

from kvlite.documents.tracker import Tracker
from kvlite.errors import DocumentError

# A book of 320,000 words takes 5 seconds and 400 MB.
_SECONDS = 120
_HEAP = "600m"
_RTS = "+RTS", f"-M{_HEAP}", "-RTS"
_HEAP_EXHAUSTED = 251
# Elements of a formula, deeper than anyone writes them.
_MOST_MATH = 60


def pandoc_tree(data: bytes, form: str, tracker: Tracker) -> Any:
    """The body of a document that is in one of pandoc's formats, as elements of HTML.

    Args:
        form: what pandoc calls it.

    Raises:
        DocumentError: pandoc is missing, or takes too long.
        MemoryError: it takes more memory than any document.
        ValueError: it cannot read the document.
    """
    from lxml.etree import HTMLParser, fromstring

    parser = HTMLParser(huge_tree=True, remove_comments=True, encoding="utf-8")
    return fromstring(_converted(data, form, tracker), parser).find("body")


def write_formulas(found: Sequence[Any], form: str, tracker: Tracker) -> None:
    """Write formulas as TeX in their place, or as their plain text where pandoc fails.

    Args:
        found: elements of MathML in HTML, or of Word.
        form: "html" or "docx".

    Raises:
        As `pandoc_tree`.
    """
    from lxml.etree import tostring

    if not found:
        return
    for each in found:
        for inner in list(each.iter()):
            if inner.tag in ("annotation", "annotation-xml") or _is_deep(inner, each):
                inner.clear(keep_tail=True)
    made = (tostring(each, encoding="unicode", with_tail=False) for each in found)
    # Paragraphs without a word might be left out.
    if form == "docx":
        text = "".join(f"<w:p><w:r><w:t>x</w:t></w:r>{each}</w:p>" for each in made)
        data = _packed(text)
    else:
        # pandoc takes none that declare names of other markup.
        text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", "".join(f"<p>x{each}</p>" for each in made))
        data = text.encode(errors="replace")
    for each, paragraph in zip(found, pandoc_tree(data, form, tracker).iter("p"), strict=True):
        spans = (span for span in paragraph.iter("span") if "math" in span.get("class", ""))
        tex = "".join((span.text or "")[2:-2] for span in spans)
        plain = " ".join("".join(each.itertext()).split())
        lacks = Counter(re.findall(r"\d", plain)) - Counter(re.findall(r"\d", tex))
        each.clear(keep_tail=True)
        each.tag, each.text = "span", plain if lacks or not tex else _readable(tex)


def _packed(body: str) -> bytes:
    """A Word document of nothing but these paragraphs."""
    office = "http://schemas.openxmlformats.org"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(
            "_rels/.rels",
            f'<Relationships xmlns="{office}/package/2006/relationships"><Relationship Id="r" '
            f'Type="{office}/officeDocument/2006/relationships/officeDocument" '
            'Target="word/document.xml"/></Relationships>',
        )
        archive.writestr(
            "word/document.xml",
            f'<w:document xmlns:w="{office}/wordprocessingml/2006/main"><w:body>{body}</w:body>'
            "</w:document>",
        )
    return out.getvalue()


def _is_deep(element: Any, formula: Any) -> bool:
    depth = takewhile(lambda each: each is not formula, element.iterancestors())
    return element is not formula and sum(1 for _ in depth) > _MOST_MATH


def _converted(data: bytes, form: str, tracker: Tracker) -> bytes:
    """What pandoc makes of a document, as HTML."""
    spec = find_spec("pypandoc")
    folders = [] if spec is None else spec.submodule_search_locations or []
    found = (shutil.which("pandoc", path=f"{folder}/files") for folder in folders)
    program = next(filter(None, found), None)
    if program is None:
        raise DocumentError(
            f"{tracker.label} needs pandoc, which is missing: pip install pypandoc_binary."
        )
    arguments = ["--sandbox", "--track-changes=all", "--wrap=none", "--mathjax", "--standalone"]
    with subprocess.Popen(
        [program, *arguments, "-M", "pagetitle= ", "-f", form, "-t", "html", *_RTS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        try:
            out, said = running.communicate(data, _SECONDS)
        except subprocess.TimeoutExpired:
            running.kill()
            raise DocumentError(
                f"{tracker.label} takes more than {_SECONDS} seconds to read: split it, or save it "
                "as text."
            ) from None
    if running.returncode in (_HEAP_EXHAUSTED, -9):
        raise MemoryError(f"pandoc takes more than {_HEAP}")
    if running.returncode:
        raise ValueError(said.decode(errors="replace"))
    for warning in re.findall(r"(?m)^\[WARNING\] (.{1,80})", said.decode(errors="replace")):
        tracker.not_read[f"part that pandoc warns of ({warning})"] += 1
    return out


def _readable(tex: str) -> str:
    """TeX, without the brackets that it needs no more when people read it."""
    tex = re.sub(r"\\phantom\{[^{}]*\}", "", " ".join(tex.split()))
    tex = re.sub(r"([\^_])\{(\w+)\}(?!\w)", r"\1\2", tex)
    return re.sub(r"(?<![\w}])\\frac\{(\w+)\}\{(\w+)\}(?![\w({\\^])", r"\1/\2", tex)
