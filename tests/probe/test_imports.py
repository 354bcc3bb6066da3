from __future__ import annotations

import subprocess
import sys

import pytest

LOADED = """
import sys, time
before = set(sys.modules)
began = time.process_time()
{statement}
took = time.process_time() - began
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(took * 1e3, *sorted(new - set(sys.stdlib_module_names)))
"""
ALLOWED = {"inferscope", "msgspec", "typing_extensions"}
"""The last is msgspec's wish: it takes it where it is installed."""
BASE = "import msgspec"
STATEMENTS = ("import inferscope", "from inferscope.probe import Probe")
LARGEST_RATIO = 4.0
"""To what importing msgspec takes, processor time both: what else the machine does slows both."""


@pytest.mark.thorough
@pytest.mark.process
@pytest.mark.parametrize("statement", STATEMENTS, ids=["package", "probe"])
def test_importing_loads_msgspec_and_little_else(statement: str) -> None:
    fastest_ms = {}
    for _ in range(5):
        for imported in (BASE, statement):
            command = [sys.executable, "-c", LOADED.format(statement=imported)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            took_ms, *loaded = done.stdout.split()
            fastest_ms[imported] = min(float(took_ms), fastest_ms.get(imported, float("inf")))
            assert set(loaded) <= ALLOWED
    assert fastest_ms[statement] < LARGEST_RATIO * fastest_ms[BASE]
