"""A program that ends while it is observed: most end without a call."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from inferscope.adapters import watch
from inferscope.adapters.patching import Patches
from inferscope.adapters.recorder import Recorders
from inferscope.probe import EngineInfo, HostTimer
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


def test_a_program_that_just_ends_writes_a_shutdown_record_in_every_ring(tmp_path: Path) -> None:
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


class Model:
    """What generates."""


def describe() -> tuple[EngineInfo, HostTimer]:
    return EngineInfo(0, "test"), HostTimer()


def test_a_delayed_return_leaves_a_recorder_that_is_in_use_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delayed: list[threading.Thread] = []

    def hold_back(*arguments: Any) -> None:
        delayed.append(threading.Thread(target=arguments[0], args=arguments[1:]))

    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    monkeypatch.setattr(watch, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(watch, "start_thread", hold_back)
    recorders, model, this = Recorders(Patches("test")), Model(), threading.get_ident()
    first = recorders.take(model, describe, thread=this)
    assert first is not None
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with recorders._lock:
            is_held.set()
            may_end.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(30)
    recorders.give_back(first)
    may_end.set()
    holder.join()
    recorders.give_back_own()
    assert recorders.take(model, describe, thread=this) is first
    request = first.probe.queued("r", prompt_tokens=1)
    (late,) = delayed
    late.start()
    late.join()
    assert list(first.probe.live_requests) == [request]
    assert recorders.take(model, describe) is not first
    recorders.give_back(first)
    assert recorders.take(model, describe) is first
    recorders.close()
