"""Sanitizing of external text: addresses without credentials, names without escape sequences."""

from __future__ import annotations

import re

_LONGEST_NAME = 200


def without_secrets(url: str) -> str:
    """Return a URL, or text given as one, without user, password, query and fragment."""
    scheme, slashes, rest = url.partition("//") if "//" in url else ("", "", url)
    server = re.split(r"[/?#]", rest)[0]
    port = server.rpartition(":")[2] if ":" in server else ""
    if "@" in rest and "@" not in server and port and not port.isdecimal():
        rest = rest.rpartition("@")[2]  # a password that holds one of the three characters
    server, slash, path = re.split(r"[?#]", rest)[0].partition("/")
    return f"{scheme}{slashes}{server.rpartition('@')[2]}{slash}{path}"


def printable(text: str) -> str:
    """Return a text of bounded length with `?` for characters that a terminal interprets."""
    return one_line(text[:_LONGEST_NAME])


def one_line(text: str) -> str:
    """Return a text with `?` for line breaks and other characters that a terminal interprets."""
    return "".join(each if each.isprintable() else "?" for each in text)
