"""What damaged bytes make the parsers raise besides their own errors; found by fuzzing them."""

import lzma
import zipfile
import zlib

PARSER_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, OSError),
    *(RuntimeError, TypeError, ValueError, lzma.LZMAError, zipfile.BadZipFile, zlib.error),
)
