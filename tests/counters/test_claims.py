from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferscope.counters.claims import Claims
from inferscope.counters.source import Unavailable

HOLD = """
import sys
from pathlib import Path
from inferscope.counters.claims import Claims
claims = Claims(Path(sys.argv[1]))
claims.take("GPU-1")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_device_has_one_sampler_and_the_second_is_told_which(tmp_path: Path) -> None:
    first, second = Claims(tmp_path), Claims(tmp_path)
    first.take("GPU-1")
    first.take("GPU-1")
    with pytest.raises(Unavailable, match=f"GPU-1 is sampled already, by process {os.getpid()}"):
        second.take("GPU-1")
    second.take("GPU-2")
    first.close()
    second.take("GPU-1")
    second.close()
    second.close()


def test_a_claim_goes_with_a_process_that_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    claims = Claims(tmp_path)
    with pytest.raises(Unavailable, match=f"by process {holder.pid}"):
        claims.take("GPU-1")
    holder.kill()
    holder.communicate()
    claims.take("GPU-1")
    claims.close()


def test_a_name_from_outside_leads_nowhere_else(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    claims = Claims(home)
    claims.take("../../etc/GPU")
    assert [path.parent for path in tmp_path.glob("**/*.lock")] == [home]
    claims.close()
    (home / "GPU-9.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unavailable, match="cannot open"):
        claims.take("GPU-9")
    assert not (tmp_path / "elsewhere").exists()
