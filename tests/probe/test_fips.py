"""A host in FIPS mode: Python has no BLAKE2, or refuses to use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferscope.records import RequestEvent
from tests.probe.fakes import of

NO_BLAKE2 = """
import hashlib, os, sys
if sys.argv[1] == "absent":
    del hashlib.blake2b
else:
    def blake2b(*_, **__):
        raise ValueError("[digital envelope routines] unsupported")
    hashlib.blake2b = blake2b
from inferscope.probe import EngineInfo, Probe
probe = Probe.open(EngineInfo(0, "fips"))
assert probe.on is (os.environ["INFERSCOPE"] != "0")
probe.queued("mrs-smith", prompt_tokens=300)
probe.close()
"""


@pytest.mark.parametrize("how", ["absent", "refused"])
@pytest.mark.parametrize("asked", ["0", "1"])
def test_a_machine_without_blake2_is_observed(tmp_path: Path, how: str, asked: str) -> None:
    environment = {
        **os.environ,
        "INFERSCOPE": asked,
        "INFERSCOPE_DIR": str(tmp_path),
        "INFERSCOPE_RING_MB": "1",
        "INFERSCOPE_IDS": "hash",
    }
    done = subprocess.run(
        [sys.executable, "-c", NO_BLAKE2, how], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    rings = list(tmp_path.glob("*/*.ring"))
    assert len(rings) == int(asked)
    for ring in rings:
        (event,) = of(RequestEvent, ring)
        assert "smith" not in event.request_id
