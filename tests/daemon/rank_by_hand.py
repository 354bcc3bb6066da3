"""A second rank of the engine of by_hand.py: it executes steps as its standard input commands.

step N   it executes a step
hang N   it begins a step, and no more
"""

from __future__ import annotations

import sys

from inferscope.probe import EngineInfo, Probe


def main() -> None:
    """Serve standard input."""
    info = EngineInfo(0, "by-hand", model="none", ranks=(1, 0, 0, 0), sizes=(2, 1, 1, 1))
    probe = Probe.open(info, role="worker", rank=1)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        verb, number = line.split()
        probe.start(int(number))
        if verb == "step":
            probe.stop(int(number))
        sys.stdout.write("done\n")
        sys.stdout.flush()
    probe.close()


main()
