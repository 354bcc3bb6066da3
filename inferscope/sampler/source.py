"""The interface of a counter source: opened, read on a schedule, and possibly lost.

    open ──► facts of each device ──► read, read, … ──► close
      │                                   │
      └────────── Unavailable ◄───────────┘    with the reason and the remedy

A lost source is reported once and retried later; the others continue. A value that a device does
not provide is absent from its samples, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from inferscope.records import CounterSample

SOURCES = ("nvml", "gpm", "pm", "dcgm", "host")
AUTO = ("nvml", "gpm", "host")
"""Sources that disturb no other process. dcgm and pm are read only if they are named."""
DCGM_URL = "INFERSCOPE_DCGM_URL"
"""Environment variable with the URL of dcgm-exporter's metrics page."""
_NVIDIA = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))

ASK_AGAIN_NS = 10_000_000_000
"""Interval in nanoseconds between a source's retries of devices that it could not start."""

LogLine = Callable[[str], None]
"""Function that prints one line for the operator."""


def has_nvidia() -> bool:
    """Return whether an NVIDIA driver is present, without loading a library."""
    return any(path.exists() for path in _NVIDIA)


class Unavailable(Exception):
    """A source or device cannot be read; the message gives the reason in one line."""


class Claimer(Protocol):
    """Claims of devices for one sampler."""

    def take(self, device: str) -> None:
        """Claim a device unless this process holds it already.

        Raises:
            Unavailable: another process holds it.
        """


class Source(Protocol):
    """A reader of one kind of counters on all claimed devices.

    Attributes:
        name: name in samples, options and messages.
        period_ns: period of reads in nanoseconds.
    """

    name: str
    period_ns: int

    def open(self, now_ns: int) -> list[CounterSample]:
        """Start reading; return the facts of each device.

        Raises:
            Unavailable: no device can be read.
        """

    def read(self, now_ns: int) -> list[CounterSample]:
        """Return the samples since the last call, and changes of the devices' state.

        Raises:
            Unavailable: no device can be read any more.
        """

    def close(self) -> None:
        """Release all resources; safe to call twice and after a failed `open`."""


def facts(source: str, device_uuid: str, now_ns: int, properties: dict[str, str]) -> CounterSample:
    """Return the record that a source has started reading a device, with its properties."""
    return CounterSample(now_ns, device_uuid, now_ns, now_ns, source, {}, properties)


def silence(source: str, device_uuid: str, now_ns: int, reason: str) -> CounterSample:
    """Return the record that a source, or one device of it, is unavailable."""
    return CounterSample(now_ns, device_uuid, now_ns, now_ns, source, {}, {}, reason)


def sample(
    source: str, device_uuid: str, *, start_ns: int, end_ns: int, values: dict[str, float]
) -> CounterSample:
    """Return the sample of one window, without values that are infinite or NaN."""
    known = {word: value for word, value in values.items() if math.isfinite(value)}
    return CounterSample(end_ns, device_uuid, start_ns, end_ns, source, known)
