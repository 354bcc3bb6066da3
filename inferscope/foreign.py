"""Text from outside, made fit to be shown: addresses without credentials, names without escapes."""

from __future__ import annotations

import re

_LONGEST_NAME = 200


def without_secrets(url: str) -> str:
    """Return a URL, or what was given for one, without user, password, query and fragment."""
    scheme, slashes, rest = url.partition("//") if "//" in url else ("", "", url)
    server = re.split(r"[/?#]", rest)[0]
    port = server.rpartition(":")[2] if ":" in server else ""
    if "@" in rest and "@" not in server and port and not port.isdecimal():
        rest = rest.rpartition("@")[2]  # a password that holds one of the three characters
    server, slash, path = re.split(r"[?#]", rest)[0].partition("/")
    return f"{scheme}{slashes}{server.rpartition('@')[2]}{slash}{path}"


def printable(text: str) -> str:
    """Return a text of bounded length in which `?` replaces what a terminal may act on."""
    return one_line(text[:_LONGEST_NAME])


def one_line(text: str) -> str:
    """Return a text in which `?` replaces line breaks and all else that a terminal may act on."""
    return "".join(each if each.isprintable() else "?" for each in text)
