"""The envelope and the conventions of all `--json` output.

    {"version":1, ...}          one object per command, one version for all commands

A duration or a time is an integer of nanoseconds whose key ends in `_ns`. A rate's key ends in
`_s`, with the unit before it: `bytes_s`, `flops_s`, `tok_s`. A share is a fraction from 0 to 1. A
count has no suffix. `docs/json.md` lists all keys; `docs/json_reference.py` generates it from the
types.
"""

from __future__ import annotations

import msgspec

VERSION = 1
"""Version that rises if a key is renamed, removed or redefined; a new key keeps it."""

_ESCAPED = {
    code: f"\\u{code:04x}"
    for code in (
        *range(0x7F, 0xA0),
        *range(0x200B, 0x2010),
        *range(0x2028, 0x202F),
        *range(0x2060, 0x2070),
    )
}
"""JSON's escapes of what a terminal may act on, beyond those that JSON demands."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON document that a command prints with `--json`.

    Subclasses are keyword-only too: msgspec encodes keyword-only fields last, and `version` is the
    first key of every document.
    """

    version: int = VERSION
    """Version of the JSON documents: 1. A new key does not raise it, any other change does."""


def json_line(document: Document) -> str:
    """Return a document as the one line of JSON that a command prints."""
    return msgspec.json.encode(document).decode().translate(_ESCAPED) + "\n"
