"""The PM source over a library that is as strict as NVIDIA's headers and documentation."""

from __future__ import annotations

import ctypes
import importlib
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferscope.probe.clock import SystemClock
from inferscope.records import COLUMNS, COUNTERS
from inferscope.sampler.claims import NoClaims
from inferscope.sampler.cupti import layout
from inferscope.sampler.cupti.library import Cupti, CuptiError, cuda_release
from inferscope.sampler.cupti.pm import CuptiPmSource
from inferscope.sampler.cupti.session import hardware_buffer_bytes, most_samples
from tests.sampler.cupti_releases import Release, compile_with, each_release

SOURCE = Path(__file__).with_name("strict_cupti.cpp")
INTERVAL_NS = 50_000
STALL_NS = 2_500_000_000
"""Longer than the two seconds of windows that the image holds."""


class Strict(Cupti):
    """The strict library, with its own account of what went wrong."""

    @property
    def fault(self) -> str:
        text: bytes = self._library.strict_fault()
        return text.decode()

    @property
    def num_open(self) -> int:
        number: int = self._library.strict_num_open()
        return number

    def advance(self, ns: int) -> None:
        """Advance the clock of the device."""
        self._library.strict_advance(ctypes.c_uint64(ns))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Keep each release's library for all tests that use it."""
    return {}


@pytest.fixture
def strict(
    release: Release, built: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Strict]:
    path = built.get(release.version)
    if path is None:
        out = tmp_path_factory.mktemp("strict") / "libcupti.so"
        path = compile_with(release, SOURCE, "-shared", "-fPIC", out=out)
        built[release.version] = path
    library = Strict(str(path))
    library._library.strict_fault.restype = ctypes.c_char_p
    library._library.strict_reset()
    yield library
    assert library.fault == ""


@contextmanager
def source_of(strict: Strict, lines: list[str]) -> Iterator[CuptiPmSource]:
    source = CuptiPmSource(
        NoClaims(),
        clock=SystemClock(),
        log_line=lines.append,
        period_ns=10**8,
        interval_ns=INTERVAL_NS,
        load=lambda: strict,
        list_devices=lambda: [f"GPU-{uuid.uuid4()}"],
    )
    with closing(source):
        yield source


@pytest.fixture(autouse=True)
def _permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferscope.sampler.cupti.pm.may_profile", lambda: True)
    monkeypatch.setattr("inferscope.sampler.cupti.pm.counter_holders", lambda despite: {})


@each_release()
def test_a_session_opens_reads_and_closes_without_a_fault(strict: Strict) -> None:
    with source_of(strict, []) as source:
        for _ in range(2):  # a second session is as good as the first
            (opened,) = source.open(time.monotonic_ns())
            assert opened.facts["chip"] == "GH100"
            assert "missing" not in opened.facts
            assert set(opened.facts["counted"].split()) <= COUNTERS.keys()
            assert opened.facts["cupti"].startswith(f"{strict.version} ")
            assert cuda_release(strict.version)
            for num_windows, num_seen in ((200, 199), (100, 100)):  # the first began before it
                strict.advance(num_windows * INTERVAL_NS)
                (one,) = source.read(time.monotonic_ns())
                starts = np.frombuffer(one.starts_ns, COLUMNS["starts_ns"])
                ends = np.frombuffer(one.ends_ns, COLUMNS["ends_ns"])
                assert len(starts) == num_seen
                assert set(ends - starts) == {INTERVAL_NS}
                assert one.values["num_dropped"] == 0
                assert one.values["dram_read_bytes"] == len(starts) * 1e6
                assert one.values["l2_sectors"] == len(starts) * 1e6
                assert one.values["sm_active_share"] == pytest.approx(0.5)
                assert one.values["gpc_clock_mhz"] == pytest.approx(1500)
            source.close()
            source.close()
            assert strict.num_open == 0


@each_release()
def test_the_kit_times_every_call_of_a_session(
    strict: Strict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend("benchmarks/gpu")
    stages = importlib.import_module("stages")
    spent = stages.Spent()
    library = stages.timed_cupti(strict, spent)
    source = stages.pm_source(library, interval_ns=INTERVAL_NS)
    source._list_devices = lambda: [f"GPU-{uuid.uuid4()}"]
    read, source.period_ns = source.read, 10_000_000

    def read_on(now_ns: int) -> Any:
        strict.advance(100 * INTERVAL_NS)
        return read(now_ns)

    source.read = read_on
    row = stages.read_for(source, 0.1, spent)
    assert row["num_windows"] == 100 * row["num_reads"]
    calls = {name: one["num"] / row["num_reads"] for name, one in row["calls"].items()}
    assert calls == {
        "cuptiPmSamplingDecodeData": 1,
        "cuptiPmSamplingGetCounterDataInfo": 1,
        "cuptiPmSamplingCounterDataGetSampleInfo": 100,
        "cuptiProfilerHostEvaluateToGpuValues": 100,
    }
    shares = sum(one["cpu_share"] for one in row["calls"].values())
    assert row["cpu_share"] == pytest.approx(
        shares + row["python_share"] + row["other_threads_share"], rel=0.01
    )


@each_release()
def test_windows_of_a_long_stall_are_lost_counted_and_reported(strict: Strict) -> None:
    lines: list[str] = []
    with source_of(strict, lines) as source:
        source.open(time.monotonic_ns())
        strict.advance(10 * INTERVAL_NS)
        (first,) = source.read(time.monotonic_ns())
        assert first.values["num_dropped"] == 0
        strict.advance(STALL_NS)
        (late,) = source.read(time.monotonic_ns())
        num_kept = len(late.starts_ns) // 8
        assert num_kept == 2_000_000_000 // INTERVAL_NS
        strict.advance(10 * INTERVAL_NS)
        (after,) = source.read(time.monotonic_ns())
    num_lost = late.values["num_dropped"] + after.values["num_dropped"]
    first_ns = np.frombuffer(first.ends_ns, COLUMNS["ends_ns"])[-1] + first.real_offset_ns
    last_ns = np.frombuffer(after.starts_ns, COLUMNS["starts_ns"])[0] + after.real_offset_ns
    between = round((last_ns - first_ns) / INTERVAL_NS)
    assert num_kept + num_lost == between  # none is counted twice, none is forgotten
    assert late.values["num_dropped"] == STALL_NS // INTERVAL_NS - num_kept
    assert len(lines) == 1
    assert "lack timestamps and count as lost" in lines[0]


@pytest.mark.parametrize("interval_us", [50, 100, 500, 1000])
def test_the_image_holds_two_seconds_of_windows(interval_us: int) -> None:
    assert most_samples(interval_us * 1000) * interval_us >= 2_000_000


def test_the_device_s_buffer_holds_as_much_time_at_shorter_intervals() -> None:
    sizes = [hardware_buffer_bytes(us * 1000) >> 20 for us in (1000, 500, 250, 100, 50)]
    assert sizes == [64, 64, 128, 320, 512]


@each_release()
def test_the_strict_library_sees_a_wrong_size_and_a_wrong_order(
    release: Any, strict: Strict
) -> None:
    with pytest.raises(CuptiError):
        strict.call("cuptiPmSamplingEnable", layout.Enable())
    assert "num_initialized" in strict.fault
    strict._library.strict_reset()
    params = layout.Initialize(structSize=24)
    assert strict._library.cuptiProfilerInitialize(ctypes.byref(params))
    assert "size 24, not 16" in strict.fault
    strict._library.strict_reset()
