"""A fleet of synthetic engines that write real rings in real time, at a low cost.

An engine's records are those of `collector_speed.busy_engine`, with what a probe adds: a keyframe
every ten seconds and a report on itself every tenth of a second. To make them takes longer than to
write them, so engines share: those of one score write the same records, each into its own ring
under its own engine id. A reader cannot tell, for what a request is called, and its number, are its
engine's own.
"""

from __future__ import annotations

import os
import socket
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

from collector_speed import GAP_NS, busy_engine
from msgspec.structs import replace

from inferscope.records import (
    FINISHED,
    ON,
    QUEUED,
    Clock,
    EngineInfo,
    Keyframe,
    Live,
    ProbeHealth,
    Record,
    RequestEvent,
    StepSpan,
    encode,
)
from inferscope.ring.discovery import boot_id
from inferscope.ring.layout import STARTS_KEYFRAME, Identity
from inferscope.ring.writer import RingWriter

MODEL = "made-up-8b"
KEYFRAME_NS = 10_000_000_000
HEALTH_NS = 100_000_000
PAUSE_S = 0.004
_NO_END = 1 << 40
_JITTER_NS = 200_000
"""Nanoseconds by which `busy_engine` lengthens a step on average."""


class Score:
    """Records that the engines of one score write, in order of time.

    Attributes:
        num_steps: written so far, by each of them.
        num_finished: requests, likewise.
    """

    def __init__(self, seed: int, *, batch: int, rate_hz: float, start_ns: int) -> None:
        """Create the source of the records, which start at `start_ns`."""
        step_ns = round(1e9 / rate_hz) - GAP_NS - _JITTER_NS
        records = busy_engine(_NO_END, batch, seed, step_ns=step_ns, start_ns=start_ns)
        info = next(records)
        assert isinstance(info, EngineInfo)
        self._info = replace(info, model=MODEL, device_uuid=f"GPU-{seed}")
        self._records = records
        self._next = next(records)
        self._in_flight: dict[int, tuple[int, int, str]] = {}
        self._keyframe_ns = self._health_ns = start_ns
        self._num_frames = 0
        self.num_steps = 0
        self.num_finished = 0

    def due(self, now_ns: int, previous_position: int) -> Iterator[tuple[Record, int]]:
        """Yield the records up to a time, each with its frame's flags."""
        while self._next.t_ns <= now_ns:
            record = self._next
            self._next = next(self._records)
            self._note(record)
            self._num_frames += 1
            yield record, 0
            if record.t_ns >= self._health_ns:
                self._health_ns = record.t_ns + HEALTH_NS
                yield self._health(record.t_ns), 0
            if record.t_ns >= self._keyframe_ns:
                self._keyframe_ns = record.t_ns + KEYFRAME_NS
                yield from self._keyframe(record.t_ns, previous_position)

    @property
    def next_ns(self) -> int:
        """Return the time of the next records."""
        return self._next.t_ns

    def _note(self, record: Record) -> None:
        if isinstance(record, RequestEvent):
            if record.kind == QUEUED:
                request = (record.t_ns, record.prompt_tokens or 0, record.request_id)
                self._in_flight[record.index] = request
            elif record.kind == FINISHED:
                del self._in_flight[record.index]
                self.num_finished += 1
        elif isinstance(record, StepSpan):
            self.num_steps += 1

    def _health(self, t_ns: int) -> ProbeHealth:
        return ProbeHealth(t_ns, ON, self._num_frames, 0, self.num_steps * 20_000, t_ns)

    def _keyframe(self, t_ns: int, previous: int) -> Iterator[tuple[Record, int]]:
        yield Keyframe(t_ns, ON, previous), STARTS_KEYFRAME
        yield replace(self._info, t_ns=t_ns), 0
        requests = self._in_flight.values()
        yield (
            Live(
                t_ns,
                array("I", self._in_flight).tobytes(),
                b"\1" * len(requests),
                array("I", [prompt for _, prompt, _ in requests]).tobytes(),
                array("I", [0] * len(requests)).tobytes(),
                array("q", [arrived_ns for arrived_ns, _, _ in requests]).tobytes(),
                tuple(request_id for _, _, request_id in requests),
            ),
            0,
        )
        yield Clock(t_ns, time.time_ns()), 0


class Fleet:
    """Synthetic engines, several of which share each score.

    Attributes:
        names: of the engines.
        late_ns: how late each look at what is due found something.
    """

    def __init__(
        self, folder: Path, num_engines: int, *, num_scores: int, batch: int, rate_hz: float,
        ring_bytes: int, start_ns: int | None = None,
    ) -> None:  # fmt: skip
        """Create the rings; the records start at `start_ns`, by default now."""
        start_ns, real_ns = start_ns or time.monotonic_ns(), time.time_ns()
        num_scores = min(num_scores, num_engines)
        apart_ns = round(1e9 / rate_hz / num_scores)
        self._parts: list[tuple[Score, list[RingWriter]]] = []
        self.names = [f"fleet-{number:03}" for number in range(num_engines)]
        self.late_ns: list[int] = []
        for seed in range(num_scores):
            begin_ns = start_ns + seed * apart_ns
            score = Score(seed, batch=batch, rate_hz=rate_hz, start_ns=begin_ns)
            self._parts.append((score, []))
        for number, name in enumerate(self.names):
            identity = Identity(
                name, "core", 0, os.getpid(), socket.gethostname(), boot_id(), start_ns, real_ns,
                synthetic=True,
            )  # fmt: skip
            (folder / name).mkdir(mode=0o700)
            path = folder / name / f"core-0-{os.getpid()}.ring"
            ring = RingWriter(path, identity, capacity=ring_bytes)
            ring.beat(start_ns)
            self._parts[number % num_scores][1].append(ring)

    def play(self, until_ns: int) -> None:
        """Write records as they fall due, until a time."""
        while (now_ns := time.monotonic_ns()) < until_ns:
            self.write(now_ns)
            time.sleep(PAUSE_S)

    def write(self, now_ns: int) -> None:
        """Write all records due at a time."""
        for score, rings in self._parts:
            if score.next_ns <= now_ns:
                self.late_ns.append(now_ns - score.next_ns)
            first = rings[0]  # all rings of a score are at the same position
            for record, flags in score.due(now_ns, first.last_keyframe):
                payload = encode(record)
                for ring in rings:
                    ring.write(record.CODE, payload, flags=flags)
            for ring in rings:
                ring.beat(now_ns)
                ring.set_pending(score.next_ns)  # no earlier record follows

    def counts(self) -> dict[str, int]:
        """Return the number of steps and of finished requests of all engines so far."""
        parts = self._parts
        return {
            "steps": sum(score.num_steps * len(rings) for score, rings in parts),
            "requests": sum(score.num_finished * len(rings) for score, rings in parts),
        }

    def live_on(self, seconds_s: float) -> None:
        """Stay idle for a while with open requests and no steps."""
        end_s = time.monotonic() + seconds_s
        while time.monotonic() < end_s:
            for _, rings in self._parts:
                for ring in rings:
                    ring.beat(time.monotonic_ns())
                    ring.set_pending(0)
            time.sleep(0.1)

    def close(self) -> None:
        """Close the rings."""
        for _, rings in self._parts:
            for ring in rings:
                ring.close()
