"""Pins where files cannot grow: run with a folder; prints the collector's messages."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from inferscope.daemon.config import PinSettings
from inferscope.daemon.pins import Pins
from tests.daemon.rings import SECOND_NS, Ring, Time

folder, time = Path(sys.argv[1]), Time()
ring = Ring(folder, time)
ring.pass_time(30)
settings = PinSettings(folder / "pins")
pins = Pins(
    settings,
    lambda: [ring.path],
    clock=time,
    log_line=lambda s: sys.stdout.write(s + "\n") and None,
)
resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
for _ in range(200):
    pins.pin("breach", time.now_ns - SECOND_NS, time.now_ns)
    ring.pass_time(1)
    pins.advance()
pins.close()
