"""Preload of the parts' files, and compilation of the engine's kernels, outside the parts' time.

It is run by run.py before the parts, in a process of its own.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from contextlib import suppress
from pathlib import Path

_MODULES = (
    "torch", "triton", "numpy", "msgspec", "safetensors", "tokenizers",
    "transformers.models.llama.modeling_llama", "pynvml", "inferscope.engine",
    "inferscope.sampler.sampler", "inferscope.cli.doctor.command",
)  # fmt: skip
_CHUNK_BYTES = 1 << 24
_MODEL = "random:llama-8b,layers=1"
"""Kernels are compiled for the heads of the kit's default model, however many layers it has."""


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
    if ncu is not None:
        found.append(Path(ncu))  # a script; the program and its libraries are in a folder beside it
        found += sorted(Path(ncu).resolve().parent.glob("target/*x64/ncu"))
        found += sorted(Path(ncu).resolve().parent.glob("target/*x64/*.so*"))
    for path in found:
        with suppress(OSError), path.open("rb") as file:
            while file.read(_CHUNK_BYTES):
                pass


def device() -> None:
    """Run a prompt on the device, if there is one: libraries are loaded, kernels are compiled."""
    import torch

    if not torch.cuda.is_available():
        return
    from inferscope.engine import EngineOptions, Sampling, load_engine

    options = EngineOptions(
        device="cuda:0", max_running=2, num_blocks=64, max_model_tokens=512, prefix_cache=False
    )
    engine = load_engine(_MODEL, options)
    engine.generate([[1] * 100], Sampling(max_tokens=4, ignore_eos=True))


if __name__ == "__main__":
    not_here = modules()
    libraries()
    if "torch" not in not_here:
        device()
    sys.stdout.write(f"not here: {', '.join(not_here) or 'nothing'}\n")
