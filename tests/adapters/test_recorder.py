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


FORKING = """
import os, sys, threading
from inferscope.adapters.patching import Patches
from inferscope.adapters.recorder import Recorders
from inferscope.probe import EngineInfo, HostTimer

class Model:
    pass

recorders, model = Recorders(Patches("test")), Model()
is_within, may_go_on = threading.Event(), threading.Event()

def describe():
    is_within.set()
    may_go_on.wait(20)
    return EngineInfo(0, "test"), HostTimer()

holder = threading.Thread(target=recorders.take, args=(model, describe))
holder.start()
is_within.wait(20)
child = os.fork()
if child == 0:
    recorders.give_back_own()
    sys.exit(7)  # at exit the rings are closed
watchdog = threading.Timer(10, os.kill, (child, 9))
watchdog.start()
_, status = os.waitpid(child, 0)
watchdog.cancel()
may_go_on.set()
holder.join()
print(os.waitstatus_to_exitcode(status))
"""


def test_a_child_that_is_forked_while_another_thread_opens_a_ring_ends(tmp_path: Path) -> None:
    environment = {**os.environ, "INFERSCOPE_DIR": str(tmp_path), "INFERSCOPE_RING_MB": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FORKING], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout == "7\n", done.stderr
