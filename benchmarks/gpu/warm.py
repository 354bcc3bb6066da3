"""Preload of the parts' files: a cold disk would otherwise take up the parts' time.

It is run by run.py before the parts, in a process of its own.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from contextlib import suppress
from pathlib import Path

_MODULES = (
    "torch", "numpy", "msgspec", "safetensors", "tokenizers", "transformers.models.llama",
    "pynvml", "inferscope.engine", "inferscope.sampler.sampler", "inferscope.cli.doctor.command",
)  # fmt: skip
_CHUNK_BYTES = 1 << 24


def modules() -> list[str]:
    """Import what the parts import; return the names of those that are not here."""
    return [name for name in _MODULES if not is_imported(name)]


def is_imported(name: str) -> bool:
    """Import a module; return whether it is here."""
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def libraries() -> None:
    """Read the files that are loaded late: CUPTI with what is beside it, and Nsight Compute."""
    from inferscope.sampler.cupti.search import candidates

    found = [path for library in candidates() for path in Path(library).parent.glob("libnvperf*")]
    found += [Path(library) for library in candidates()]
    ncu = shutil.which("ncu")
    for path in [*found, *([Path(ncu)] if ncu else [])]:
        with suppress(OSError), path.open("rb") as file:
            while file.read(_CHUNK_BYTES):
                pass


def device() -> None:
    """Run one product on the device, if there is one: its libraries are loaded by that."""
    import torch

    if torch.cuda.is_available():
        left = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
        torch.mm(left, left)
        torch.cuda.synchronize()


if __name__ == "__main__":
    not_here = modules()
    libraries()
    if "torch" not in not_here:
        device()
    sys.stdout.write(f"not here: {', '.join(not_here) or 'nothing'}\n")
