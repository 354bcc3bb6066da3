"""(g) GPM against PM sampling over the same loads: is the fleet's source to be believed?"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from part import Setting, main
from watched import Sampler, Windows

WORDS = ("sm_active_share", "tensor_share", "dram_share", "busy_share")
_EDGE_NS = 200_000_000
"""Left out at both ends of a load: GPM's windows are 100 ms."""


def measure(setting: Setting) -> dict[str, Any]:
    """Run each load for a few seconds under both sources at once."""
    setting.need_gpu()
    stretches = {}
    with Sampler("gpm,pm") as sampler:
        for name, work in loads().items():
            start_ns = time.monotonic_ns()
            until_s = time.monotonic() + max(2.0, setting.seconds / 6)
            while time.monotonic() < until_s:
                work()
                torch.cuda.synchronize()
            stretches[name] = (start_ns + _EDGE_NS, time.monotonic_ns() - _EDGE_NS)
    sources = {name: sampler.of(name) for name in ("gpm", "pm")}
    rows = [
        {
            "load": name,
            "counter": word,
            **{
                source: Windows(samples, word).mean(*stretch) for source, samples in sources.items()
            },
        }
        for name, stretch in stretches.items()
        for word in WORDS
    ]
    lines = [
        f"{row['load']:<8} {row['counter']:<16} "
        + ", ".join(
            f"{name} {'-' if row[name] is None else f'{row[name]:.3f}'}" for name in sources
        )
        for row in rows
    ]
    return {"rows": rows, "lines": lines}


def loads() -> dict[str, Callable[[], object]]:
    """Return loads that stress memory, tensor pipes, both in turn, and next to nothing."""
    source = torch.ones(1 << 28, device="cuda")
    copied = torch.zeros_like(source)
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    one = torch.ones(1, device="cuda")

    def launches() -> None:
        for _ in range(200):
            one.add_(1.0)

    def half() -> None:
        copied.copy_(source)
        torch.cuda.synchronize()
        time.sleep(0.001)

    return {
        "copy": lambda: copied.copy_(source),
        "product": lambda: torch.mm(left, right),
        "half": half,
        "launches": launches,
    }


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
