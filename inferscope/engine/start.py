"""Entry point of a model's process: `python -m inferscope.engine.start MODULE ARGUMENT...`.

The 170,000 objects of torch's import live until the process exits. Without this module, garbage
collection scans them during the import (0.2 s), in each full collection between steps (0.1 s), and
once more at exit (0.5 s).
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_that_stay() -> Iterator[None]:
    """Disable garbage collection within the context, and exempt all objects alive at its end."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def main() -> int:
    """Import the module named by the first argument and run its `main` with the rest."""
    del sys.argv[0]
    with imports_that_stay():
        module = importlib.import_module(sys.argv[0])
    return int(module.main())


if __name__ == "__main__":
    sys.exit(main())
