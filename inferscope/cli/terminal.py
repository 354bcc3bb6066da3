"""What the caller's shell and terminal can do: cursor movement, characters, commands on PATH.

A character that a stream cannot encode is replaced by a similar one of the same width. In JSON it
is replaced by its escape sequence.
"""

from __future__ import annotations

import codecs
import io
import os
import shlex
import shutil
import sys
from typing import TextIO

_SIMILAR, _ESCAPED = "inferscope.similar", "inferscope.escaped"


def can_draw(stream: TextIO | None = None) -> bool:
    """Return whether a stream (default: standard output) is a terminal with cursor movement."""
    stream = sys.stdout if stream is None else stream
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def replace_unencodable(*, is_json: bool = False) -> None:
    """Make standard output and error replace characters that they cannot encode."""
    for stream, errors in ((sys.stdout, _ESCAPED if is_json else _SIMILAR), (sys.stderr, _SIMILAR)):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def own_command() -> str:
    """Return how this shell calls this program: by its name, or by its path if not on PATH."""
    called = sys.argv[0]
    is_on_path = shutil.which("inferscope") is not None
    return "inferscope" if is_on_path or not os.access(called, os.X_OK) else shlex.quote(called)


def _similar(error: UnicodeError) -> tuple[str, int]:
    from inferscope.text.plots import to_ascii

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
