"""Names of requests: as they are, or as digits that tell one from another and no more.

    INFERSCOPE_IDS=hash

Clients choose them (X-Request-Id; some engines make their own of it) and may put anything in. The
digits of a name are the same in all processes, so records of one request still find each other, and
who knows the name finds the request: `inferscope why NAME`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from inferscope.probe.voice import warn

VARIABLE = "INFERSCOPE_IDS"
_HASH = "hash"


def hiding(environment: Mapping[str, str]) -> Callable[[object], str] | None:
    """Return what a request's names are put through; None where they are told as they are."""
    asked = environment.get(VARIABLE, "")
    if not asked:
        return None
    if asked != _HASH:  # somebody wants them hidden; if not, nothing is lost for good
        warn("%s is %r, taken for %s: names of requests are hidden.", VARIABLE, asked, _HASH)
    digits("")  # loads the library now, not within a request
    return digits


def digits(name: object) -> str:
    """Return sixteen digits that stand for a text, or for bytes."""
    from hashlib import blake2b  # with OpenSSL: 5 ms that importing the probe need not take

    raw = name if isinstance(name, bytes) else str(name).encode("utf-8", "surrogatepass")
    return blake2b(raw, digest_size=8, person=b"inferscope").hexdigest()
