"""What a source of counters is: something that opens, is read on a schedule, and may be lost.

    open ──► facts of each device ──► read, read, … ──► close
      │                                   │
      └────────── Unavailable ◄───────────┘    with the reason, and what to do about it

A source that is lost says so once and is tried again later; the others go on without it. What a
device cannot tell is left out of its samples, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from inferscope.records import CounterSample

SOURCES = ("nvml", "gpm", "pm", "dcgm", "host")
AUTO = ("nvml", "gpm", "host")
"""What costs nobody anything. dcgm joins where it is named, pm only where it is asked for."""
DCGM_URL = "INFERSCOPE_DCGM_URL"
"""The environment's variable for the page of dcgm-exporter."""
_NVIDIA = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))

ASK_AGAIN_NS = 10_000_000_000
"""Until a source that goes on asks again for a device that was refused."""

Say = Callable[[str], None]
"""Prints a line for whoever looks after this machine."""


def has_nvidia() -> bool:
    """Tell whether an NVIDIA driver is here, without loading anything."""
    return any(path.exists() for path in _NVIDIA)


class Unavailable(Exception):
    """A source has nothing to tell, for the reason given, in one line."""


class Claimer(Protocol):
    """Says which devices are this sampler's."""

    def take(self, device: str) -> None:
        """Claim a device, unless it is ours already.

        Raises:
            Unavailable: somebody else has it.
        """


class Source(Protocol):
    """Reads counters of one kind, of all devices that it may.

    Attributes:
        name: in samples, options and messages.
        period_ns: between two reads.
    """

    name: str
    period_ns: int

    def open(self, now_ns: int) -> list[CounterSample]:
        """Begin; return the facts of each device.

        Raises:
            Unavailable: nothing can be read here.
        """

    def read(self, now_ns: int) -> list[CounterSample]:
        """Return what was counted since the last call, and news of devices.

        Raises:
            Unavailable: nothing can be read any more.
        """

    def close(self) -> None:
        """Let go of everything; safe to call twice, and after a failed `open`."""


def facts(source: str, device_uuid: str, now_ns: int, told: dict[str, str]) -> CounterSample:
    """Return the news that a source has opened a device, with what there is to say of it."""
    return CounterSample(now_ns, device_uuid, now_ns, now_ns, source, {}, told)


def silence(source: str, device_uuid: str, now_ns: int, reason: str) -> CounterSample:
    """Return the news that a source has nothing more to tell, of one device or at all."""
    return CounterSample(now_ns, device_uuid, now_ns, now_ns, source, {}, {}, reason)


def sample(
    source: str, device_uuid: str, *, start_ns: int, end_ns: int, values: dict[str, float]
) -> CounterSample:
    """Return what was counted over one window, without what is no number."""
    known = {word: value for word, value in values.items() if math.isfinite(value)}
    return CounterSample(end_ns, device_uuid, start_ns, end_ns, source, known)
