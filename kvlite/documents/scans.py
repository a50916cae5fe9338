"""Pages of a PDF that are pictures, read by OCR (the extra `ocr`).

PDFium draws a page, RapidOCR finds and reads its lines, with models that come with it: nothing is
downloaded, and no language has to be named.
"""

import os
from importlib.util import find_spec
from typing import Any

from kvlite.config.threads import processor_share
from kvlite.documents.reading_order import Box, lines_of
from kvlite.errors import SettingError

# Dots an inch, of 72 points; and the most pixels of a page, however large it is.
_DOTS, _PIXELS = 200, 12_000_000
_NEEDED = "rapidocr", "onnxruntime"


def require_ocr(wanted: bool) -> None:
    """Raises SettingError if OCR is wanted and a library is missing."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if wanted and missing:
        raise SettingError(
            f"--ocr needs {', '.join(missing)}, not installed here: pip install 'kvlite[ocr]', or "
            "leave it out"
        )


class Scans:
    """Reads pages of PDFs; models are loaded with the first that is read."""

    def __init__(self) -> None:
        self._engine: Any = None

    def text(self, page: Any) -> str:
        """The lines of a page; "" if it has none, or cannot be drawn. Takes seconds."""
        import pypdfium2

        if self._engine is None:
            self._engine = _engine()
        try:
            width, height = page.get_size()
            scale = min(_DOTS / 72, (_PIXELS / max(1.0, width * height)) ** 0.5)
            picture = page.render(scale=scale, grayscale=True).to_numpy()
        except (pypdfium2.PdfiumError, ValueError, MemoryError):
            return ""
        found = self._engine(picture)
        if found.boxes is None or found.txts is None:
            return ""
        corners = [(box[:, 0], box[:, 1]) for box in found.boxes]
        boxes = [
            Box(text, float(x.min()), float(y.min()), float(x.max()), float(y.max()))
            for text, (x, y) in zip(found.txts, corners, strict=True)
        ]
        return "\n".join(lines_of(boxes))


def _engine() -> Any:
    from rapidocr import RapidOCR

    share = processor_share()
    threads = int(os.environ.get("OMP_NUM_THREADS", 0) or share or os.cpu_count() or 1)
    given = {
        "Global.log_level": "critical",
        "EngineConfig.onnxruntime.intra_op_num_threads": max(1, threads),
    }
    return RapidOCR(params=given)
