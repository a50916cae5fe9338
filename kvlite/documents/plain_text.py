"""Decoding text, in whatever encoding it is."""

from kvlite.documents.tracker import Tracker
from kvlite.errors import DocumentError

_BOMS = (
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xff\xfe\x00\x00", "utf-32-le"),  # before UTF-16: its mark begins the same
    (b"\x00\x00\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)
# Left to all its codecs, charset_normalizer reads a short Latin-1 text as UTF-16 or as DOS Urdu.
_ENCODINGS = (
    "cp1250 cp1251 cp1252 cp1253 cp1254 cp1255 cp1256 iso8859_2 koi8_r mac_roman cp932 euc_jp "
    "gb18030 big5 cp949"
)


def decoded(data: bytes, tracker: Tracker, *, html: bool = False) -> str:
    """Bytes as text.

    Raises:
        DocumentError: they are no text, or in no encoding that could be recognized.
    """
    label = tracker.label
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            try:
                return data[len(mark) :].decode(encoding)
            except UnicodeDecodeError:
                raise DocumentError(
                    f"{label} begins as {encoding.upper()} but does not go on so, as if cut or "
                    "damaged: save it again as UTF-8."
                ) from None
    if b"\0" in data:
        raise DocumentError(
            f"{label} holds binary data, not text: convert it to text or PDF first "
            "(if it is text in UTF-16, save it as UTF-8)."
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        pass
    if html:
        from bs4.dammit import EncodingDetector

        try:
            return data.decode(EncodingDetector.find_declared_encoding(data, is_html=True) or "")
        except (LookupError, UnicodeDecodeError):
            pass
    from charset_normalizer import from_bytes

    matches = from_bytes(data, cp_isolation=_ENCODINGS.split())
    best = matches.best()
    if best is None:
        raise DocumentError(f"{label} is in no encoding kvlite can recognise: save it as UTF-8.")
    # Among equally clean readings the commonest encoding is the likeliest, not the first by name.
    western = (
        match
        for match in matches
        if "cp1252" in match.could_be_from_charset and match.chaos <= best.chaos
    )
    return str(next(western, best))
