"""The kernel's counters of a process that wants a CPU, read by the probe's own thread."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from inferscope.probe import host_pressure
from inferscope.probe.host_pressure import MOST_THREADS, PERIOD_NS, HostPressure
from inferscope.records import AMOUNTS, COUNTERS, CounterSample, ProbeHealth
from tests.children import child
from tests.probe.fakes import FakeClock, do_step, make_probe, records

BURN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
READ = """
import json, os, sys, time
from inferscope.probe.host_pressure import HostPressure
os.sched_setaffinity(0, {int(sys.argv[1])})
host = HostPressure()
host.read(time.monotonic_ns())
while True:
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        pass
    now_ns = time.monotonic_ns()
    start_ns, values = host.read(now_ns)
    print(json.dumps({"window_ns": now_ns - start_ns, **values}), flush=True)
"""


def has(path: str) -> bool:
    return Path(path).exists()


@pytest.mark.skipif(not has("/proc/self/schedstat"), reason="this kernel does not count waits")
def test_a_process_that_shares_its_cpu_waits_in_the_run_queue() -> None:
    cpu = str(min(os.sched_getaffinity(0)))
    with (
        child([sys.executable, "-c", BURN, cpu]),
        child([sys.executable, "-c", READ, cpu], stdout=subprocess.PIPE, text=True) as reader,
    ):
        assert reader.stdout is not None
        for line in reader.stdout:  # until the burner is up
            values = json.loads(line)
            share = values["run_wait_ns"] / values["window_ns"]
            if share > 0.25:
                break
        assert share <= 1
        # The counters of the process and of its thread are not read at the same instant.
        assert values["cpu_ns"] <= (1 - share + 0.1) * values["window_ns"]
        assert values["host_busy_ns"] >= 0.5 * values["window_ns"]
        assert values["pid"] == reader.pid


@pytest.mark.skipif(not has("/proc/self/schedstat"), reason="this kernel does not count waits")
def test_the_threads_that_compute_are_read_however_many_older_ones_are_idle() -> None:
    is_over = threading.Event()
    idle = [threading.Thread(target=is_over.wait) for _ in range(MOST_THREADS + 8)]
    for thread in idle:
        thread.start()
    computing_ids: list[str] = []

    def compute() -> None:
        computing_ids.append(str(threading.get_native_id()))
        while not is_over.is_set():
            hashlib.sha256(bytes(1 << 20)).digest()

    threads = [threading.Thread(target=compute) for _ in range(2)]
    host = HostPressure()
    host.read(1)
    try:
        for thread in threads:
            thread.start()
        number = 1
        while len(computing_ids) < 2 or not set(host._threads).issuperset(computing_ids):
            number += 1
            assert number < 3000
            is_over.wait(0.01)
            host.read(number)
        assert len(host._threads) <= MOST_THREADS
    finally:
        is_over.set()
        for thread in (*idle, *threads):
            thread.join()


@pytest.mark.skipif(not has("/proc/self/schedstat"), reason="this kernel does not count waits")
def test_threads_that_share_the_computing_alike_are_all_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, num_threads, lap = HostPressure(), 20, 0
    monkeypatch.setattr(host_pressure, "_thread_ids", lambda: [*map(str, range(num_threads + 1))])

    def read(path: str, num_bytes: int) -> bytes:
        number = int(path.split("/")[4])
        return b"%d %d 1" % (lap * (1_000 if number else 1), lap * 500)

    monkeypatch.setattr(host_pressure, "_text", read)
    assert host._waits_ns() == 0
    lap = 1
    assert host._waits_ns() == num_threads * 500


def test_what_is_counted_are_amounts_of_known_counters() -> None:
    host = HostPressure()
    assert host.read(1) is None
    reading = host.read(1 + PERIOD_NS)
    assert reading is not None
    start_ns, values = reading
    assert start_ns == 1
    assert values.keys() <= COUNTERS.keys()
    assert values.keys() - AMOUNTS == {"pid", "num_cpus"}
    assert min(values.values()) >= 0
    assert not host.is_due(1 + 2 * PERIOD_NS - 1)
    assert host.is_due(1 + 2 * PERIOD_NS)


def test_a_reading_keeps_no_file_open_and_passes_threads_that_have_ended() -> None:
    host = HostPressure()
    is_over = threading.Event()
    threads = [threading.Thread(target=is_over.wait) for _ in range(4)]
    num_open = len(os.listdir("/proc/self/fd"))
    for thread in threads:
        thread.start()
    host.read(1)
    is_over.set()
    for thread in threads:
        thread.join()
    assert host.read(2) is not None
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_the_housekeeping_thread_reads_and_the_next_report_writes(tmp_path: Path) -> None:
    clock = FakeClock(step_ns=1)
    probe = make_probe(tmp_path, clock)
    for step in range(4):
        clock.now_ns += PERIOD_NS
        probe._keeper._read_host(clock.now_ns)
        do_step(probe, step, [])
    probe.close()
    written = records(tmp_path / "a.ring")
    samples = [record for record in written if isinstance(record, CounterSample)]
    assert [(sample.source, sample.device_uuid) for sample in samples] == [("host", "")] * 3
    for before, after in itertools.pairwise(samples):
        assert before.end_ns == after.start_ns
    times_ns = [record.t_ns for record in written]
    assert times_ns == sorted(times_ns)
    assert isinstance(written[-1], ProbeHealth)


@pytest.mark.parametrize("links", [["cpu"], [], ["cpu", "cpuacct"]])
def test_time_held_back_by_a_quota_counts_once_however_many_names_its_folder_has(
    links: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "cpu,cpuacct"  # of version 1 of control groups
    (home / "pod").mkdir(parents=True)
    for folder, throttled_ns in ((home, 1000), (home / "pod", 500)):
        text = f"nr_periods 1\nnr_throttled 1\nthrottled_time {throttled_ns}\n"
        (folder / "cpu.stat").write_text(text)
    for link in links:
        (tmp_path / link).symlink_to("cpu,cpuacct")
    membership = tmp_path / "cgroup"
    membership.write_text("4:cpu,cpuacct:/pod\n3:memory:/pod\n1:name=systemd:/pod\n")
    monkeypatch.setattr(host_pressure, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host_pressure, "_MEMBERSHIP", membership)
    assert HostPressure()._quota() == {"quota_ns": 1500}
