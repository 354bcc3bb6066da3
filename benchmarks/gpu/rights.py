"""What CUPTI itself answers to a process with few rights; run by part (a), as root.

It loads everything as root, becomes another user, and then goes the way of PM sampling step by
step, without the checks that the sampler makes before: each answer is the library's own.

python rights.py UID none|perfmon
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from inferscope.errors import InferScopeError
from inferscope.sampler.cuda_driver import CudaDevices
from inferscope.sampler.cupti.library import Cupti, CuptiError
from inferscope.sampler.cupti.search import usable
from inferscope.sampler.cupti.session import Session
from inferscope.sampler.privilege import become
from inferscope.sampler.source import Unavailable

_INTERVAL_NS = 500_000
_SAMPLED_S = 0.2
OK = "ok"


def answers(uid: int, rights: str) -> dict[str, Any]:
    """Return the answer to each step, up to the first one that is refused."""
    found: dict[str, Any] = {"rights": "as it was started", "steps": {}, "num_windows": 0}
    importlib.import_module("encodings.ascii")
    cupti: list[Cupti] = []
    session: list[Session] = []

    def give_up_rights() -> None:
        found["rights"] = become(uid, keeps_counters=rights == "perfmon") or found["rights"]
        if rights == "perfmon" and "CAP_PERFMON" not in found["rights"]:
            raise Unavailable("this root has no CAP_PERFMON to keep")

    def sample() -> None:
        time.sleep(_SAMPLED_S)
        found["num_windows"] = len(session[0].decode().windows.rows)

    steps: dict[str, Callable[[], object]] = {
        "library": lambda: cupti.append(usable()),
        "rights": give_up_rights,
        "driver": lambda: CudaDevices().uuids()[0],
        "initialise": lambda: cupti[0].begin(),
        "session": lambda: session.append(
            Session(cupti[0], 0, CudaDevices().uuids()[0], interval_ns=_INTERVAL_NS)
        ),
        "sample": sample,
    }
    for name, step in steps.items():
        found["steps"][name] = _answer(step)
        if found["steps"][name] != OK:
            break
    for opened in session:
        opened.close()
    if found["steps"].get("initialise") == OK:
        cupti[0].end()
    return found


def _answer(step: Callable[[], object]) -> str:
    try:
        step()
    except (Unavailable, InferScopeError, CuptiError, IndexError, OSError) as error:
        return str(error)
    return OK


if __name__ == "__main__":
    sys.stdout.write(json.dumps(answers(int(sys.argv[1]), sys.argv[2])) + "\n")
