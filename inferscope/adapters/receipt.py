"""Receipt: when uvicorn had read a request's headers, which is before its handler has its turn.

Requests that come together are tasks that run one after the other: the last of twelve, each parsed
and tokenised in a millisecond, would else seem to have come when the eleventh was through.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from time import monotonic_ns
from typing import Any

from inferscope.adapters.patching import Patches

_KEY = "inferscope.received_ns"
_PROTOCOLS = ("uvicorn.protocols.http.httptools_impl", "uvicorn.protocols.http.h11_impl")


def stamp_receipts(patches: Patches) -> None:
    """Hook the uvicorn protocols imported by now, to note the time of each receipt."""
    for name in _PROTOCOLS:
        cycle_class = getattr(sys.modules.get(name), "RequestResponseCycle", None)
        patches.around(cycle_class, "__init__", after=_stamp)


def received_ns(scope: Mapping[str, Any]) -> int:
    """Return when a request's headers were read; now, where no server has noted it."""
    noted: int | None = scope.get(_KEY)
    return monotonic_ns() if noted is None else noted


def _stamp(_: None, result: None, cycle: Any, *args: Any, **kwargs: Any) -> None:
    cycle.scope[_KEY] = monotonic_ns()
