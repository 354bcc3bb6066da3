"""A part of the kit: a program that measures one thing and leaves JSON, whatever happens."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TINY = "random:hidden=128,layers=2,heads=4,kv_heads=2,ffn=256,vocab=512"
"""What a dry run serves: it says nothing of anything, but runs the same lines."""


class Unmet(Exception):
    """What a part needs is not here."""


@dataclass(frozen=True)
class Setting:
    """What a part was asked for.

    Attributes:
        device: cuda:0, or cpu in a dry run.
        model: whose steps are measured.
        seconds: to take, about.
        is_dry: to try the lines, not the device.
    """

    device: str
    model: str
    seconds: float
    is_dry: bool

    @property
    def is_cuda(self) -> bool:
        """Tell whether there is a GPU to measure."""
        return self.device.startswith("cuda")

    def need_gpu(self) -> None:
        """Leave a part that says nothing without a GPU.

        Raises:
            Unmet: there is none.
        """
        if not (self.is_cuda and torch.cuda.is_available()):
            raise Unmet("needs an NVIDIA GPU")


Measure = Callable[[Setting], dict[str, Any]]


def main(measure: Measure, about: str) -> int:
    """Run a part as a program; 1 if it failed."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", default="random:llama-8b")
    parser.add_argument("--seconds", type=float, default=60.0, help="to take, about")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model, for two seconds")
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    options = parser.parse_args()
    setting = Setting(options.device, options.model, options.seconds, is_dry=False)
    if options.dry_run:
        setting = Setting(options.device, TINY, min(options.seconds, 2.0), is_dry=True)
    began_s = time.monotonic()
    result = _outcome(measure, setting)
    result["took_s"] = round(time.monotonic() - began_s, 1)
    for line in result.get("lines") or [result.get("reason", "")]:
        print(line, flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(result["status"] == "failed")


def _outcome(measure: Measure, setting: Setting) -> dict[str, Any]:
    try:
        return {"status": "dry" if setting.is_dry else "measured", **measure(setting)}
    except Unmet as reason:
        return {"status": "unmet", "reason": str(reason)}
    except Exception as error:
        trace = traceback.format_exc()
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}", "trace": trace}
