"""Starts a process that runs a model: `python -m inferscope.engine.start MODULE ARGUMENT...`.

What torch's import leaves, 170,000 objects, stays to the end. Without this module they are searched
for garbage while they are imported (0.2 s), by each full search in the midst of steps (0.1 s), and
once more when Python ends (0.5 s).
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_that_stay() -> Iterator[None]:
    """Import within the context; exempt all objects that exist at its end from searches."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def main() -> int:
    """Import the module that the first argument names, and run its `main` with the others."""
    del sys.argv[0]
    with imports_that_stay():
        module = importlib.import_module(sys.argv[0])
    return int(module.main())


if __name__ == "__main__":
    sys.exit(main())
