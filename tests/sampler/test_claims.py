from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from inferscope.sampler.claims import Claims, SessionClaims
from inferscope.sampler.source import Unavailable
from tests.children import child

HOLD_SESSION = """
import os, sys
from inferscope.sampler.claims import SessionClaims
os.setuid(int(sys.argv[2]))
claims = SessionClaims()
claims.take(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""
HOLD = """
import sys
import uuid
from pathlib import Path
from inferscope.sampler.claims import Claims
claims = Claims(Path(sys.argv[1]))
claims.take("GPU-1")
print("held", flush=True)
sys.stdin.read()
"""


def test_device_has_one_sampler_and_the_second_names_it(tmp_path: Path) -> None:
    first, second = Claims(tmp_path), Claims(tmp_path)
    first.take("GPU-1")
    first.take("GPU-1")
    with pytest.raises(Unavailable, match=f"process {os.getpid()} samples GPU-1 already"):
        second.take("GPU-1")
    second.take("GPU-2")
    first.close()
    second.take("GPU-1")
    second.close()
    second.close()


def test_a_claim_goes_with_a_process_that_is_killed(tmp_path: Path) -> None:
    with child(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        claims = Claims(tmp_path)
        with pytest.raises(Unavailable, match=f"process {holder.pid} samples"):
            claims.take("GPU-1")
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


@pytest.fixture
def device() -> str:
    """Name a device that no other test on this machine has."""
    return f"GPU-{uuid.uuid4()}"


@pytest.mark.parametrize("uid", [os.getuid(), 65534])
def test_a_session_is_one_for_all_folders_and_users_and_goes_with_its_process(
    device: str, uid: int
) -> None:
    if uid != os.getuid() and os.geteuid() != 0:
        pytest.skip("only root can switch to another user")
    with child(
        [sys.executable, "-c", HOLD_SESSION, device, str(uid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        claims = SessionClaims()
        claims.take(f"{device}0")  # a name that only begins like it
        with pytest.raises(Unavailable) as refused:
            claims.take(device)
        assert str(refused.value) == (
            f"process {holder.pid} holds the PM session of {device}; "
            "this sampler takes over when it exits."
        )
    claims.take(device)
    claims.take(device)
    claims.close()
    claims.close()


def test_taken_session_is_refused_where_the_kernel_lists_no_holder(
    device: str, tmp_path: Path
) -> None:
    first, second = SessionClaims(), SessionClaims(tmp_path / "none")
    first.take(device)
    with pytest.raises(Unavailable, match=r"another process .* holds the PM session"):
        second.take(device)
    first.close()
    second.take(device)
    second.close()
