"""Commands of ours beside a real engine, and modules of the tests within one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from tests.engines_real import after_import

_MOST_S = 120


def inferscope(rings: Path, *words: str) -> str:
    """Run a command of ours on a folder of rings; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "inferscope", *words],
        env={**os.environ, "INFERSCOPE_DIR": str(rings)},
        capture_output=True,
        text=True,
        timeout=_MOST_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def import_at_start(module: ModuleType, folder: Path) -> None:
    """Copy a module to a folder whose place on PYTHONPATH has every Python process import it."""
    folder.mkdir(parents=True)
    for each in (module, after_import):
        path = Path(str(each.__file__))
        shutil.copy(path, folder / path.name)
    name = module.__name__.rpartition(".")[2]
    (folder / "sitecustomize.py").write_text(f"import {name}\n")
