"""What a collector's allocator has free is the system's again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_PROGRAM = """
from pathlib import Path
from inferscope.daemon.memory import configure_trim

def resident_mb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

configure_trim()
del (first := [bytearray(2_000_000)])[0]  # from which glibc learns to keep such pieces
before_mb = resident_mb()
pieces = [bytearray(b"1" * 2_000_000) for _ in range(50)]
del pieces[:-1]
print(resident_mb() - before_mb)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is set")
def test_pieces_of_a_batch_go_back_though_the_last_of_them_stays() -> None:
    """As glibc is set by default, nearly all of their 95 MB are kept."""
    answer = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, check=True)
    assert float(answer.stdout) < 10
