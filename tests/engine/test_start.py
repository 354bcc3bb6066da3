from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from inferscope.engine.start import imports_that_stay

STARTED = """
import gc, sys
during = gc.isenabled()
stays = [[number] for number in range(1000)]
def main():
    print(during, gc.isenabled(), gc.get_freeze_count() > 1000, sys.argv[1:])
    return 7
"""


def test_started_module_gets_its_arguments_and_is_exempt_from_collection(tmp_path: Path) -> None:
    (tmp_path / "started.py").write_text(STARTED, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "inferscope.engine.start", "started", "a", "b"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == "False True True ['a', 'b']\n"


def fail_to_import() -> None:
    with imports_that_stay():
        assert not gc.isenabled()
        raise ImportError


def test_collection_is_enabled_after_a_failed_import() -> None:
    with pytest.raises(ImportError):
        fail_to_import()
    assert gc.isenabled()
