"""Names of requests: as they are, or as digits that identify one and reveal no more.

    INFERSCOPE_IDS=hash

Clients choose them (X-Request-Id; some engines make their own of it) and may put anything in. The
digits of a name are the same in all processes, so records of one request still find each other, and
who knows the name finds the request: `inferscope why NAME`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from inferscope.probe.host_log import warn

VARIABLE = "INFERSCOPE_IDS"
_HASH = "hash"
_PERSON = b"inferscope"


def hiding(environment: Mapping[str, str]) -> Callable[[object], str] | None:
    """Return the function that hides a request's names; None if they are recorded unchanged."""
    asked = environment.get(VARIABLE, "")
    if not asked:
        return None
    if asked != _HASH:  # hidden is the safe reading of a mistake
        warn("%s is %r, taken for %s: names of requests are hidden.", VARIABLE, asked, _HASH)
    digits("")  # loads the library now, not within a request
    return digits


def digits(name: object) -> str:
    """Return sixteen digits that stand for a text, or for bytes.

    FIPS mode has no BLAKE2 and gives other digits: search for the name on a host in the same mode.
    """
    import hashlib  # with OpenSSL: 5 ms that importing the probe need not take

    raw = name if isinstance(name, bytes) else str(name).encode("utf-8", "surrogatepass")
    try:
        return hashlib.blake2b(raw, digest_size=8, person=_PERSON).hexdigest()
    except (AttributeError, ValueError):
        return hashlib.sha256(_PERSON + raw).hexdigest()[:16]
