"""Standard output and error: whether they are terminals that draw, and what their encodings lack.

A stream whose encoding lacks a sign gets one that is similar, of the same width; in JSON, whose
text beyond ASCII is within strings, it gets the escape that stands for the sign.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import TextIO

_SIMILAR, _ESCAPED = "inferscope.similar", "inferscope.escaped"


def can_draw(stream: TextIO | None = None) -> bool:
    """Return whether a stream, standard output by default, is a terminal that moves its cursor."""
    stream = sys.stdout if stream is None else stream
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def print_what_is_encodable(*, is_json: bool = False) -> None:
    """Make standard output and error replace what their encodings lack, and not raise."""
    for stream, errors in ((sys.stdout, _ESCAPED if is_json else _SIMILAR), (sys.stderr, _SIMILAR)):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _similar(error: UnicodeError) -> tuple[str, int]:
    from inferscope.tui.plots import to_ascii

    if not isinstance(error, UnicodeEncodeError):
        raise error
    return to_ascii(error.object[error.start : error.end]), error.end


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)), error.end


codecs.register_error(_SIMILAR, _similar)
codecs.register_error(_ESCAPED, _escaped)
