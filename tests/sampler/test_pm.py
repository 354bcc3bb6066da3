"""The course of a PM session over a library that answers as documented.

What the device itself does only a device can show (benchmarks/gpu); here it is what we make of it.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import uuid
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from inferscope.fold.join.windows import as_recorded
from inferscope.records import COLUMNS, COUNTERS, Clock, CounterSample, decode, encode
from inferscope.sampler.claims import NoClaims
from inferscope.sampler.cupti import layout
from inferscope.sampler.cupti.library import CuptiError
from inferscope.sampler.cupti.pm import CuptiPmSource
from inferscope.sampler.cupti.session import IN_WINDOWS
from inferscope.sampler.source import Unavailable
from tests.probe.fakes import FakeClock, records
from tests.sampler.toy_source import make_tape

INTERVAL = 500_000
PERIOD = 100_000_000
UUID = f"GPU-{uuid.uuid4()}"
"""UUID of a device on which no other run of these tests has a session."""
OTHERS = {
    "gpc_clock_mhz": 1.98e9, "sys_clock_mhz": 1.6e9, "dram_clock_mhz": 3.2e9,
    "pcie_read_bytes": 512.0, "pcie_write_bytes": 1024.0,
    "nvlink_receive_bytes": 16.0, "nvlink_send_bytes": 32.0, "l2_sectors": 9e4,
}  # fmt: skip
"""CUPTI's values of words that no step is joined to: in its units, per window."""
WALL_NS = 5
"""Offset of FakeClock's wall clock in nanoseconds."""


@dataclass
class ToyCupti:
    """Stands where a loaded library does; a window is a start, an end and its metrics' values.

    Attributes:
        windows: completed windows that are not decoded yet.
        fails: functions that fail, with which code.
        calls: functions, in the order in which they were called.
        most_metrics: of a configuration that the device accepts.
    """

    windows: list[tuple[int, int, tuple[float, ...]]] = field(default_factory=list)
    fails: dict[str, int] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    overflows: bool = False
    version: int = 130001
    path: str = "toy"
    room: int = 4096
    most_metrics: int = 99
    num_metrics: int = 0
    HostInitialize = layout.HostInitialize48

    def call(self, function: str, params: Any, *, allowed: Container[int] = ()) -> int:
        self.calls.append(function)
        if function in self.fails:
            raise CuptiError(function, self.fails[function], "CUPTI_ERROR_TOY")
        answer = getattr(self, function, None)
        code: int = (answer(params) if answer is not None else None) or layout.SUCCESS
        if code and code not in allowed:
            raise CuptiError(function, code, "CUPTI_ERROR_TOY")
        return code

    def repeated(self, function: str, params: Any) -> Callable[[], None]:
        return lambda: self.call(function, params) and None

    def begin(self) -> None:
        self.call("cuptiProfilerInitialize", layout.Initialize())

    def end(self) -> None:
        self.call("cuptiProfilerDeInitialize", layout.DeInitialize())

    def cuptiDeviceGetChipName(self, params: Any) -> None:
        params.pChipName = b"GH100"

    def cuptiPmSamplingGetCounterAvailability(self, params: Any) -> None:
        params.counterAvailabilityImageSize = 64

    def cuptiProfilerHostInitialize(self, params: Any) -> None:
        assert params.profilerType == layout.PROFILER_TYPE_PM_SAMPLING
        params.pHostObject = 11

    def cuptiProfilerHostGetConfigImageSize(self, params: Any) -> None:
        params.configImageSize = 128

    def cuptiProfilerHostGetNumOfPasses(self, params: Any) -> None:
        params.numOfPasses = 1

    def cuptiPmSamplingEnable(self, params: Any) -> None:
        params.pPmSamplingObject = 22

    def cuptiProfilerHostConfigAddMetrics(self, params: Any) -> None:
        self.num_metrics = params.numMetrics

    def cuptiPmSamplingSetConfig(self, params: Any) -> int:
        assert params.samplingInterval == INTERVAL
        assert params.triggerMode == layout.TRIGGER_TIME
        assert params.hwBufferAppendMode == layout.KEEP_LATEST
        if self.num_metrics > self.most_metrics:
            return layout.ERROR_NOT_SUPPORTED
        return layout.SUCCESS

    def cuptiPmSamplingGetCounterDataSize(self, params: Any) -> None:
        params.counterDataSize = 256

    def cuptiPmSamplingDecodeData(self, params: Any) -> None:
        image = (ctypes.c_char * 8).from_address(params.pCounterDataImage)
        assert image.raw == bytes(8)  # blanked since the last time
        self.decoded, self.windows = self.windows[: self.room], self.windows[self.room :]
        image[:] = struct.pack("<q", len(self.decoded))
        params.overflow = self.overflows
        params.decodeStopReason = layout.STOPPED_FULL if self.windows else 2

    def cuptiPmSamplingGetCounterDataInfo(self, params: Any) -> None:
        params.numCompletedSamples = len(self.decoded)

    def cuptiPmSamplingCounterDataGetSampleInfo(self, params: Any) -> None:
        params.startTimestamp, params.endTimestamp, _ = self.decoded[params.sampleIndex]

    def cuptiProfilerHostEvaluateToGpuValues(self, params: Any) -> None:
        for place, value in enumerate(self.decoded[params.rangeIndex][2]):
            params.pMetricValues[place] = value


class Stage:
    """A source over a toy, on a clock that the test moves."""

    def __init__(self) -> None:
        self.toy = ToyCupti()
        self.clock = FakeClock()
        self.lines: list[str] = []
        self.source = CuptiPmSource(
            NoClaims(),
            clock=self.clock,
            log_line=self.lines.append,
            period_ns=PERIOD,
            interval_ns=INTERVAL,
            load=lambda: self.toy,  # type: ignore[arg-type, return-value]
            list_devices=lambda: [UUID],
        )

    def fill(self, num: int, *, from_ns: int, read_bytes: float = 1e6, sm: float = 50.0) -> int:
        """Complete windows by the wall clock; return the monotonic end of the last one."""
        for i in range(num):
            start_ns = from_ns + WALL_NS + i * INTERVAL
            values = (read_bytes, 5e5, sm, 99.0, 80.0, 10.0, *OTHERS.values())
            self.toy.windows.append((start_ns, start_ns + INTERVAL, values))
        return from_ns + num * INTERVAL

    def read(self) -> list[CounterSample]:
        self.clock.now_ns += PERIOD
        return self.source.read(self.clock.now_ns)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    (opened,) = stage.source.open(stage.clock.now_ns)
    assert opened.facts["chip"] == "GH100"
    assert "missing" not in opened.facts
    yield stage
    stage.source.close()


def test_windows_are_one_sample_with_a_column_per_word(stage: Stage) -> None:
    first_ns = stage.clock.now_ns
    stage.fill(201, from_ns=first_ns)
    (one,) = stage.read()
    again = decode(CounterSample.CODE, encode(one))
    assert again == one
    starts = np.frombuffer(one.starts_ns, COLUMNS["starts_ns"])
    ends = np.frombuffer(one.ends_ns, COLUMNS["ends_ns"])
    assert len(starts) == 200  # the first began before the session
    assert starts[0] == one.start_ns == first_ns + INTERVAL
    assert ends[-1] == one.end_ns == first_ns + 201 * INTERVAL
    assert set(one.series) == set(one.values) - {"num_dropped"} - OTHERS.keys()
    for word, value in OTHERS.items():
        expected = value / 1e6 if word.endswith("_mhz") else 200 * value
        assert one.values[word] == pytest.approx(expected)
    assert one.values.keys() <= COUNTERS.keys()
    assert one.values["dram_read_bytes"] == 200 * 1e6
    assert one.values["dram_write_bytes"] == 200 * 5e5
    assert one.values["sm_active_share"] == pytest.approx(0.5)
    assert one.values["num_dropped"] == 0
    column = np.frombuffer(one.series["busy_share"], COLUMNS["series"])
    assert column == pytest.approx(0.99)
    assert len(encode(one)) < 200 * 50


def test_a_reader_joins_what_it_knows_and_leaves_the_rest(stage: Stage) -> None:
    stage.fill(11, from_ns=stage.clock.now_ns)
    (one,) = stage.read()
    window = as_recorded(one)
    assert window is not None
    assert window.values.keys() == set(IN_WINDOWS)
    newer = msgspec.structs.replace(
        one,
        values={**one.values, "of_a_newer_sampler": 1.0},
        series={**one.series, "of_a_newer_sampler": one.series["busy_share"]},
    )
    again = as_recorded(decode(CounterSample.CODE, encode(newer)))  # type: ignore[arg-type]
    assert again is not None
    assert again.values["dram_read_bytes"].tolist() == [1e6] * 10


def test_an_image_that_is_full_is_decoded_again_at_once(stage: Stage) -> None:
    stage.toy.room = 64
    stage.fill(200, from_ns=stage.clock.now_ns)
    (one,) = stage.read()
    assert len(one.starts_ns) // 8 == 199
    assert stage.toy.calls.count("cuptiPmSamplingDecodeData") == 4
    assert stage.read() == []


def test_windows_that_the_device_lost_are_counted(stage: Stage) -> None:
    end_ns = stage.fill(10, from_ns=stage.clock.now_ns)
    end_ns = stage.fill(10, from_ns=end_ns + 7 * INTERVAL)
    stage.toy.overflows = True
    (one,) = stage.read()
    assert one.values["num_dropped"] == 7
    stage.fill(10, from_ns=end_ns + 3 * INTERVAL)
    (two,) = stage.read()
    assert two.values["num_dropped"] == 3
    (loss,) = stage.lines
    assert "longer --pm-interval than 500us" in loss


def test_windows_without_times_are_lost_and_counted_once(stage: Stage) -> None:
    first_ns = stage.clock.now_ns
    end_ns = stage.fill(11, from_ns=first_ns)
    stage.toy.windows += [(0, 0, (0.0,) * 14)] * 5
    (one,) = stage.read()
    assert one.values["num_dropped"] == 5
    assert "5 windows lack timestamps and count as lost" in stage.lines[-1]
    stage.fill(10, from_ns=end_ns + 7 * INTERVAL)  # the gap that those five are in, and two more
    (two,) = stage.read()
    assert two.values["num_dropped"] == 2
    stage.fill(10, from_ns=end_ns + 17 * INTERVAL)
    (three,) = stage.read()
    assert three.values["num_dropped"] == 0
    assert len(stage.lines) == 1


def test_a_session_that_gives_no_times_any_more_is_begun_anew(stage: Stage) -> None:
    stage.fill(10, from_ns=stage.clock.now_ns)
    stage.read()
    stage.toy.windows += [(0, 0, (0.0,) * 14)] * 5
    with pytest.raises(Unavailable, match=f"all 5 windows of {UUID} lack timestamps.*restarts"):
        stage.read()
    stage.source.close()
    (opened,) = stage.source.open(stage.clock.now_ns)
    assert opened.facts


def test_a_second_source_leaves_a_device_s_session_alone_until_the_first_has_ended(
    stage: Stage,
) -> None:
    second = Stage()
    with pytest.raises(Unavailable, match=f"process {os.getpid()} holds the PM session of {UUID}"):
        second.source.open(0)
    assert "cuptiPmSamplingEnable" not in second.toy.calls
    second.source.close()
    stage.source.close()
    second.source.open(0)
    second.source.close()


def stamps(one: CounterSample) -> list[int]:
    """Return where windows begin by the wall clock, as the library stamped them."""
    assert one.real_offset_ns is not None
    return (np.frombuffer(one.starts_ns, COLUMNS["starts_ns"]) + one.real_offset_ns).tolist()


@pytest.mark.parametrize("jump_ns", [3_600_000_000_000, -40_000_000, 2 * INTERVAL])
def test_stamps_stay_what_they_were_when_the_wall_clock_is_set(stage: Stage, jump_ns: int) -> None:
    stage.fill(10, from_ns=stage.clock.now_ns)
    wall_times = [at_ns for at_ns, _, _ in stage.toy.windows[1:]]
    (one,) = stage.read()
    assert stamps(one) == wall_times
    stage.fill(10, from_ns=stage.clock.now_ns)
    stage.clock.real_ns = lambda: stage.clock.now_ns + WALL_NS + jump_ns  # type: ignore[method-assign]
    stage.fill(10, from_ns=stage.clock.now_ns + 10 * INTERVAL + jump_ns)
    wall_times = [at_ns for at_ns, _, _ in stage.toy.windows]
    (two,) = stage.read()
    assert stamps(two) == wall_times
    assert two.values["num_dropped"] == 0  # the fold counts those that it cannot place
    stage.fill(10, from_ns=stage.clock.now_ns + jump_ns)
    (three,) = stage.read()
    assert three.start_ns == stage.clock.now_ns - PERIOD
    assert three.real_offset_ns == WALL_NS + jump_ns


@pytest.mark.parametrize("interrupted", [0, 1, 2])
def test_windows_stay_where_they_are_when_reading_the_clocks_is_interrupted(
    stage: Stage, interrupted: int
) -> None:
    readings = itertools.count()

    def real_ns() -> int:
        stamp_ns = stage.clock.now_ns + WALL_NS
        if next(readings) == interrupted:
            stage.clock.now_ns += 400_000  # after the wall clock was read
        return stamp_ns

    stage.fill(10, from_ns=stage.clock.now_ns)
    stage.clock.real_ns = real_ns  # type: ignore[method-assign]
    (one,) = stage.read()
    assert one.real_offset_ns == WALL_NS


def test_an_anchor_stands_before_windows_and_behind_their_stamps(
    stage: Stage, tmp_path: Path
) -> None:
    tape, path = make_tape(tmp_path, stage.clock)
    tape.tend(cost_ns=0)
    for _ in range(3):
        stage.fill(10, from_ns=stage.clock.now_ns)
        tape.put(stage.read())
        stage.clock.step_ns = 700  # that reading a clock takes
    tape.close(cost_ns=0)
    wall_times = [one for one in records(path) if isinstance(one, Clock | CounterSample)]
    assert [type(one) for one in wall_times] == [Clock, *[Clock, CounterSample] * 3]
    for clock, sample in itertools.pairwise(wall_times):
        if isinstance(sample, CounterSample):
            assert isinstance(clock, Clock)
            assert max(stamps(sample)) < clock.real_ns
            assert clock.host_ns is not None
            assert clock.error_ns is not None
            true_ns = clock.real_ns - WALL_NS
            assert abs(clock.host_ns - true_ns) <= clock.error_ns <= 700


def test_a_session_is_ended_in_order_and_once(stage: Stage) -> None:
    stage.toy.calls.clear()
    stage.source.close()
    stage.source.close()
    assert stage.toy.calls == [
        "cuptiPmSamplingStop",
        "cuptiPmSamplingDisable",
        "cuptiProfilerHostDeinitialize",
        "cuptiProfilerDeInitialize",
    ]


@pytest.mark.parametrize(
    ("function", "code", "word"),
    [
        ("cuptiPmSamplingEnable", layout.ERROR_INSUFFICIENT_PRIVILEGES, "as root"),
        ("cuptiPmSamplingEnable", layout.ERROR_INVALID_OPERATION, "in use"),
        ("cuptiPmSamplingGetCounterAvailability", layout.ERROR_HARDWARE_BUSY, "in use"),
        ("cuptiProfilerInitialize", layout.ERROR_CONFIDENTIAL_COMPUTING, "confidential"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing_behind(
    function: str, code: int, word: str
) -> None:
    stage = Stage()
    stage.toy.fails = {function: code}
    with pytest.raises(Unavailable, match=word) as refused:
        stage.source.open(0)
    assert "\n" not in str(refused.value)
    another = Stage()
    another.source.open(0)  # the device is free
    another.source.close()
    stage.source.close()
    made = stage.toy.calls.count("cuptiProfilerHostInitialize")
    assert stage.toy.calls.count("cuptiProfilerHostDeinitialize") == made


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (layout.ERROR_OUT_OF_MEMORY, "overflowed.*longer --pm-interval"),
        (layout.ERROR_UNKNOWN, "sampling of GPU-[-0-9a-f]+ stopped"),
    ],
)
def test_failed_session_is_reported(stage: Stage, code: int, message: str) -> None:
    stage.toy.fails = {"cuptiPmSamplingDecodeData": code}
    with pytest.raises(Unavailable, match=message):
        stage.read()


@pytest.mark.parametrize(("most", "kept"), [(99, 14), (13, 7), (5, 3), (1, 1)])
def test_a_device_that_refuses_the_host_s_set_is_sampled_with_a_smaller_one(
    most: int, kept: int
) -> None:
    stage = Stage()
    stage.toy.most_metrics = most
    (opened,) = stage.source.open(0)
    words = opened.facts["counted"].split()
    assert len(words) == kept
    assert "dram_read_bytes" in words  # the most important one
    assert len(opened.facts.get("missing", "").split()) == 14 - kept
    stage.source.close()
    stage.toy.most_metrics = 0
    with pytest.raises(Unavailable, match="cannot be sampled"):
        stage.source.open(0)
    stage.source.close()
