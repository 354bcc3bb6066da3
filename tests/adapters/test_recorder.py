"""A program that ends while it is observed: most do not take the trouble to say that they end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from inferscope.records import CLOSED, ProbeHealth
from tests.probe.fakes import of

PROGRAM = """
from inferscope.adapters.patching import Patches
from inferscope.adapters.recorder import Recorders
from inferscope.probe import EngineInfo, HostTimer

class Model:
    pass

recorders, model = Recorders(Patches("test")), Model()
recorders.take(model, lambda: (EngineInfo(0, "test"), HostTimer()))
recorders.take(model, lambda: (EngineInfo(0, "test"), HostTimer()))
"""


def test_a_program_that_just_ends_says_goodbye_in_every_ring(tmp_path: Path) -> None:
    environment = {**os.environ, "INFERSCOPE_DIR": str(tmp_path), "INFERSCOPE_RING_MB": "1"}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
    rings = list(tmp_path.glob("*/*.ring"))
    assert len(rings) == 2
    assert [of(ProbeHealth, ring)[-1].state for ring in rings] == [CLOSED, CLOSED]
