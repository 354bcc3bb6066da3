"""A ring whose records and whose time are made by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec

from inferscope.records import (
    CLOSED,
    ON,
    Clock,
    EngineInfo,
    Keyframe,
    Live,
    ProbeHealth,
    Record,
    encode,
)
from inferscope.ring.discovery import boot_id
from inferscope.ring.layout import STARTS_KEYFRAME, Identity
from inferscope.ring.writer import RingWriter

SECOND_NS = 1_000_000_000


class Time:
    """The clock of the ring and of its readers."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def monotonic_ns(self) -> int:
        return self.now_ns

    def real_ns(self) -> int:
        return 1_700_000_000 * SECOND_NS + self.now_ns


class Ring:
    """Ring with a keyframe every ten seconds and a health record every half second."""

    def __init__(
        self,
        folder: Path,
        time: Time,
        *,
        role: str = "core",
        rank: int = 0,
        pid: int = 1,
        engine_id: str = "made",
        device_uuid: str = "",
    ) -> None:
        self.path = folder / f"{role}-{rank}-{pid}.ring"
        self._time = time
        me = Identity(engine_id, role, rank, pid, "host", boot_id(), time.now_ns, 0)
        self._writer = RingWriter(self.path, me, capacity=1 << 18)
        self._keyframe_ns = 0
        self._device_uuid = device_uuid
        self.in_flight = Live(0, b"", b"", b"", b"", b"", ())

    def pass_time(self, seconds: float) -> None:
        """Advance the clock by this duration."""
        end_ns = self._time.now_ns + round(seconds * SECOND_NS)
        while self._time.now_ns < end_ns:
            self._time.now_ns += SECOND_NS // 2
            self.write_all()

    def write_all(self) -> None:
        """Write what is due now."""
        now_ns = self._time.now_ns
        if now_ns - self._keyframe_ns >= 10 * SECOND_NS:
            self._keyframe_ns = now_ns
            keyframe = Keyframe(now_ns, ON, self._writer.last_keyframe)
            self.write(keyframe, STARTS_KEYFRAME)
            self.write(EngineInfo(now_ns, "made-up", device_uuid=self._device_uuid))
            self.write(msgspec.structs.replace(self.in_flight, t_ns=now_ns))
            self.write(Clock(now_ns, self._time.real_ns()))
        self.write(ProbeHealth(now_ns, ON, 0, 0, 0, now_ns))
        self._writer.beat(now_ns)

    def shut_down(self) -> None:
        """End as a process does that ends well."""
        self.write(ProbeHealth(self._time.now_ns, CLOSED, 0, 0, 0, self._time.now_ns))
        self._writer.beat(0)
        self.close()

    def close(self) -> None:
        """Release the file, as the kernel does for a killed process."""
        self._writer.close()

    def write(self, record: Record, flags: int = 0) -> None:
        """Write a record."""
        self._writer.write(record.CODE, encode(record), flags=flags)
