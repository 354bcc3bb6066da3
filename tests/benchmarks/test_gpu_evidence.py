"""Conclusions of the GPU evidence kit, from counters and tables with known answers."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
import weakref
from array import array
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pynvml
import pytest
import torch

from inferscope.engine import EngineOptions
from inferscope.probe import EngineInfo, Probe
from inferscope.records import CounterSample
from inferscope.sampler.cupti import NOT_PERMITTED
from tests.sampler.recorded_nvml import H200, RecordedLibrary, Recording

pytestmark = pytest.mark.thorough

MS = 1_000_000
WINDOW_NS = MS // 2
BYTES_S = 3.0e12


class Kit(NamedTuple):
    """The kit's modules, which import each other as programs do."""

    part: ModuleType
    watched: ModuleType
    load: ModuleType
    nsight: ModuleType
    bursts: ModuleType
    edges: ModuleType
    sampling: ModuleType
    bytes: ModuleType
    ablation: ModuleType
    gpm: ModuleType
    process_clock: ModuleType


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Kit:
    monkeypatch.syspath_prepend("benchmarks")
    monkeypatch.syspath_prepend("benchmarks/gpu")
    names = (
        "part", "watched", "load", "nsight", "bursts", "edges", "a_sampling", "c_bytes",
        "f_ablation", "g_gpm", "process_clock",
    )  # fmt: skip
    return Kit(*map(importlib.import_module, names))


def samples(
    until_ns: int, traffic: list[tuple[float, float, float]], *, missing: tuple[int, ...] = ()
) -> list[CounterSample]:
    """Return windows of a device that reads at rates, each a start, an end and bytes per second.

    It writes a tenth of what it reads.
    """
    found = []
    for start_ns in range(0, until_ns, WINDOW_NS):
        if start_ns // WINDOW_NS in missing:
            continue
        end_ns = start_ns + WINDOW_NS
        read = sum(
            rate / 1e9 * max(0.0, min(end_ns, last) - max(start_ns, first))
            for first, last, rate in traffic
        )
        series = {"dram_read_bytes": read, "dram_write_bytes": read / 10, "busy_share": 0.5}
        found.append(
            CounterSample(
                end_ns,
                "GPU-1",
                start_ns,
                end_ns,
                "pm",
                dict(series),
                starts_ns=array("q", [start_ns]).tobytes(),
                ends_ns=array("q", [end_ns]).tobytes(),
                series={word: array("f", [number]).tobytes() for word, number in series.items()},
            )
        )
    return found


def test_amounts_are_those_of_the_stretch_and_none_where_windows_are_missing(kit: Kit) -> None:
    read = kit.watched.Windows(samples(100 * MS, [(0, 100 * MS, BYTES_S)]), "dram_read_bytes")
    assert read.amount(10.25 * MS, 20.25 * MS) == pytest.approx(BYTES_S * 0.010)
    rows = samples(100 * MS, [(0, 100 * MS, BYTES_S)], missing=(30,))
    holed = kit.watched.Windows(rows, "dram_read_bytes")
    assert holed.amount(10 * MS, 20 * MS) is None
    assert holed.amount(20 * MS, 30 * MS) == pytest.approx(BYTES_S * 0.010)
    # A hole of less than one per cent is filled with the stretch's own rate.
    assert holed.amount(0, 90 * MS) == pytest.approx(BYTES_S * 0.090)
    traffic = kit.watched.Traffic(rows)
    assert traffic.amount(10 * MS, 20 * MS) is None
    assert traffic.amount(20 * MS, 30 * MS) == pytest.approx(1.1 * BYTES_S * 0.010)


def test_means_weigh_by_time_and_are_none_without_windows(kit: Kit) -> None:
    rows = samples(100 * MS, [])
    busy = kit.watched.Windows(rows, "busy_share")
    assert busy.mean(0, 100 * MS) == pytest.approx(0.5)
    assert busy.mean(50 * MS, 200 * MS) is None  # a third of it is covered
    assert kit.watched.Windows([], "busy_share").mean(0, MS) is None
    assert kit.watched.window_lengths_ns(rows) == [WINDOW_NS] * 200


def test_edges_are_found_within_the_windows_that_a_load_fills_in_part(kit: Kit) -> None:
    first, last = 10.2 * MS, 21.9 * MS
    read = kit.watched.Windows(samples(40 * MS, [(first, last, BYTES_S)]), "dram_read_bytes")
    found = read.edges(0, 40 * MS)
    assert found.start_ns == pytest.approx(first, abs=100)
    assert found.end_ns == pytest.approx(last, abs=100)
    assert read.edges(30 * MS, 40 * MS) is None


def test_copies_report_their_share_and_edges_and_nothing_where_nothing_was_seen(kit: Kit) -> None:
    start_ns, end_ns = 20.1 * MS, 30.3 * MS
    true = round(1.1 * BYTES_S * (end_ns - start_ns) / 1e9)
    burst = kit.bursts.Burst(start_ns, end_ns, true)
    late = samples(60 * MS, [(start_ns + 7000, end_ns + 7000, BYTES_S)])
    row = kit.bursts.judged([burst], late)
    assert row["measured_over_true"] == pytest.approx(1.0)
    assert row["start_off_us"] == pytest.approx(7.0, abs=0.2)
    assert row["end_off_us"] == pytest.approx(7.0, abs=0.2)
    holed = samples(60 * MS, [(start_ns, end_ns, BYTES_S)], missing=(45,))
    assert kit.bursts.judged([burst], holed)["measured_over_true"] is None
    row = kit.bursts.judged([burst], [])
    assert row["measured_over_true"] is row["start_off_us"] is None
    assert kit.part.shown(row["measured_over_true"], ".3f") == "-"


def test_off_on_on_off_hides_what_grows_evenly_and_shows_what_sampling_costs(kit: Kit) -> None:
    num = 10

    def halves(cost: float) -> list[list[int]]:
        grown = [[1000 + 5 * (half * num + at) for at in range(num)] for half in range(4)]
        return [
            [round(ns * (1 + cost * (half in (1, 2)))) for ns in part]
            for half, part in enumerate(grown)
        ]

    free = kit.sampling.mirrored(*halves(0.0))
    assert len(free) == num
    assert all(sum(pair.on) == sum(pair.off) for pair in free)
    middle, low, high = kit.sampling.interval(
        kit.sampling.mirrored(*halves(0.02)), kit.sampling.mean_ratio
    )
    assert low <= middle <= high
    assert middle == pytest.approx(0.02, abs=1e-3)


def test_rows_come_in_the_order_of_what_must_be_known_first(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, ran = kit.sampling, list[str]()
    for name in (
        "facts_of_machine", "clock_line", "beside_sources", "calls_of_sources", "beside_profiler"
    ):  # fmt: skip
        monkeypatch.setattr(part, name, lambda *given, name=name: ran.append(name) or ({}, name))
    monkeypatch.setattr(
        part, "with_rights", lambda setting, name, rights: ran.append(rights) or ({}, name)
    )
    monkeypatch.setattr(part, "copies_alone", lambda *given: ran.append("copies_alone"))
    monkeypatch.setattr(part, "in_turn", lambda *given, until_s: ran.append("in_turn"))
    monkeypatch.setattr(kit.part.Setting, "need_gpu", lambda setting: None)
    bank = kit.part.Bank()
    part.measure(kit.part.Setting("cuda:0", "m", 1.0, is_dry=False), bank)
    assert bank.finish("measured")["status"] == "measured"
    assert ran == [
        "facts_of_machine", "copies_alone", "clock_line", "in_turn", "beside_sources",
        "calls_of_sources", "none", "perfmon", "beside_profiler",
    ]  # fmt: skip


def test_the_machine_and_what_doctor_finds_are_known_without_a_gpu(kit: Kit) -> None:
    row, line = kit.sampling.facts_of_machine()
    assert row["uname_r"] == os.uname().release
    assert row["uname_r"] in line
    assert {"machine", "GPU", "ring folder"} <= {each["name"] for each in row["doctor"]}
    json.dumps(row)


@pytest.mark.parametrize(
    ("version", "is_gvisor"),
    [
        ("Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016\n", True),
        ("Linux version 6.8.0-49-generic (gcc 13.2.0) #49 SMP\n", False),
    ],
)
def test_rows_of_counters_are_unmet_under_gvisor(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, is_gvisor: bool
) -> None:
    (tmp_path / "version").write_text(version)
    assert kit.part.is_gvisor(tmp_path / "version") is is_gvisor
    assert kit.part.is_gvisor(tmp_path / "none") is False
    monkeypatch.setattr(kit.part, "is_gvisor", lambda: True)
    with pytest.raises(kit.part.Unmet, match=r"gVisor .* hides the device's counters"):
        kit.watched.Sampler("gpm,pm")


def spun(kit: Kit, *, off_ns: float = 0.0, num: int = 4) -> tuple[list[Any], list[CounterSample]]:
    """Return kernels of 20 ms, and windows of 100 µs in which they are `off_ns` late."""
    kernels, busy = [], list[tuple[float, float]]()
    for at in range(num):
        start_ns = (100 + 150 * at) * MS + 37_000 * at
        end_ns = start_ns + 20 * MS
        kernels.append(
            kit.edges.Kernel(start_ns - 60_000, float(start_ns), float(end_ns), end_ns + 40_000)
        )
        busy.append((start_ns + off_ns, end_ns + off_ns))
    length = MS // 10
    starts = list(range(0, 800 * MS, length))
    shares = [
        sum(max(0.0, min(at + length, last) - max(at, first)) for first, last in busy) / length
        for at in starts
    ]
    one = CounterSample(
        starts[-1] + length, "GPU-1", 0, starts[-1] + length, "pm", {"busy_share": 0.1},
        starts_ns=array("q", starts).tobytes(),
        ends_ns=array("q", [at + length for at in starts]).tobytes(),
        series={"busy_share": array("f", shares).tobytes()},
    )  # fmt: skip
    return kernels, [one]


def test_stamps_are_held_against_the_edges_of_kernels_and_the_host_s_brackets(kit: Kit) -> None:
    row = kit.edges.held(*spun(kit))
    assert (row["num_kernels"], row["num_seen"], row["window_us"]) == (4, 4, 100.0)
    assert row["start_off_us"] == pytest.approx(0.0, abs=0.1)
    assert row["end_off_us"] == pytest.approx(0.0, abs=0.1)
    assert row["is_inside"] is True
    row = kit.edges.held(*spun(kit, off_ns=80_000))
    assert row["start_off_us"] == pytest.approx(80.0, abs=0.1)
    assert row["start_off_range_us"] == pytest.approx([80.0, 80.0], abs=0.1)
    assert row["is_inside"] is True  # within a window of the brackets
    assert kit.edges.held(*spun(kit, off_ns=900_000))["is_inside"] is False
    assert kit.edges.held(*spun(kit, off_ns=-900_000))["is_inside"] is False
    row = kit.edges.held(*spun(kit, off_ns=40.0 * MS))
    assert (row["num_seen"], row["num_runs"]) == (0, 4)
    assert row["shift_ms"] == pytest.approx(40.0, abs=0.1)
    kernels, _ = spun(kit)
    row = kit.edges.held(kernels, [])
    assert row["shift_ms"] is None
    assert row["num_seen"] == 0
    assert row["is_inside"] is row["start_off_us"] is row["window_us"] is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(torch.cuda.is_available(), reason="what is answered where there is no GPU")
@pytest.mark.parametrize("rights", ["none", "perfmon"])
def test_cupti_is_asked_step_by_step_until_a_step_is_refused(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rights: str
) -> None:
    toy = tmp_path / "libcupti.so"
    source = "int cuptiPmSamplingEnable(void *params) { return 1; }"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(toy)]
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    subprocess.run(command, input=source, text=True, check=True)
    monkeypatch.setenv("INFERSCOPE_CUPTI", str(toy))
    row = kit.sampling.asked(65534, rights)
    assert row["steps"]["library"] == "ok"
    assert row["num_windows"] == 0
    if row["steps"]["rights"] == "ok":
        kept = "with CAP_PERFMON only" if rights == "perfmon" else "without capabilities"
        assert row["rights"] == f"switched to uid 65534, {kept}"
        assert "no NVIDIA driver" in row["steps"]["driver"]
        assert "initialise" not in row["steps"]
    else:
        assert "no CAP_PERFMON" in row["steps"]["rights"]
    monkeypatch.setenv("INFERSCOPE_CUPTI", str(tmp_path / "absent"))
    assert "cannot load libcupti from" in kit.sampling.asked(65534, rights)["steps"]["library"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is answered where there is no GPU")
def test_each_source_is_read_alone_and_one_that_is_missing_has_its_reason(kit: Kit) -> None:
    rows, line = kit.sampling.calls_of_sources()
    assert [name.split()[0] for name in rows] == ["nvml", "gpm", "pm", "pm", "pm", "pm"]
    for name, row in rows.items():
        assert "NVIDIA driver" in row["reason"]
        assert name in line


def test_copies_are_put_on_our_clock_when_the_sampler_has_started(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, ran = kit.sampling, list[str]()

    class Started(Constant):
        def of(self, source: str) -> list[CounterSample]:
            ran.append("sampler")
            return super().of(source)

        def facts(self, source: str) -> dict[str, str]:
            return {}

        lines: tuple[str, ...] = ()
        refused_with_perfmon = ""

    class Anchor:
        def __init__(self) -> None:
            ran.append("anchor")
            self.error_ns = 1e3 * len(ran)

    def work() -> None: ...

    def bursts(clock: Anchor, given: Any, num_bytes: int) -> list[Any]:
        ran.append("copies" if given is work else "replays")
        end_ns = time.monotonic_ns() - 10 * MS
        return [kit.bursts.Burst(end_ns - 20 * MS, end_ns, num_bytes)]

    for name, stand_in in (
        ("Sampler", Started), ("EventClock", Anchor), ("bursts", bursts),
        ("copying", lambda: (work, 1000)), ("replaying", lambda given: list),
    ):  # fmt: skip
        monkeypatch.setattr(part, name, stand_in)
    bank = kit.part.Bank()
    part.copies_alone(kit.part.Setting("cuda:0", "m", 1.0, is_dry=False), bank)
    assert ran[:5] == ["sampler", "anchor", "copies", "anchor", "replays"]
    assert [bank.rows[name]["anchor_error_us"] for name in ("copies", "graph replays")] == [2, 4]


# --- the 100 ms regression --------------------------------------------------------------------


def in_turn(kit: Kit, turns: int) -> tuple[list[tuple[str, Any]], Any]:
    """Return decodes and prefills by turns, that move 1.2 and 0.9 of the modelled bytes."""
    at_ns, phases, traffic = 0, [], list[tuple[float, float, float]]()
    for turn in range(turns):
        for name, length_ns, rate, factor in (
            ("decode", 255 * MS + turn % 3 * MS, 2.0e12, 1.2),
            ("prefill", 240 * MS + turn % 5 * MS, 0.5e12, 0.9),
        ):
            end_ns = at_ns + length_ns
            model = round(rate * length_ns / 1e9)
            phases.append((name, kit.load.Phase(at_ns, end_ns, 1, model, 0, 0, 0)))
            traffic.append((at_ns, end_ns, factor * rate / 1.1))
            at_ns = end_ns
    return phases, kit.watched.Traffic(samples(at_ns, traffic))


def test_the_regression_of_collect_agrees_with_short_windows(kit: Kit) -> None:
    phases, counted = in_turn(kit, 14)
    found = kit.bytes.regress(phases, counted)
    assert found["num_windows"] >= 50
    for name, true in (("decode", 1.2), ("prefill", 0.9)):
        phase = found["phases"][name]
        assert phase["by_pm"] == pytest.approx(true, rel=1e-3)
        assert phase["by_regression"] == pytest.approx(true, rel=0.02)
        assert 0 < phase["error"] < 0.05
    assert "decode: 1.20" in kit.bytes.regression_lines(found)[0]


def test_the_least_turns_are_enough_for_the_windows_that_the_regression_wants(kit: Kit) -> None:
    phases, counted = in_turn(kit, kit.bytes._LEAST_TURNS)
    assert kit.bytes.regress(phases, counted)["num_windows"] >= 50
    phases, counted = in_turn(kit, 8)
    with pytest.raises(kit.part.Unmet, match="39 windows of 100 ms, 50 are needed"):
        kit.bytes.regress(phases, counted)
    with pytest.raises(kit.part.Unmet, match="0 windows"):
        kit.bytes.regress(phases, kit.watched.Traffic([]))
    assert kit.bytes.by_pm("decode", phases, kit.watched.Traffic([])) is None


# --- Nsight Compute ---------------------------------------------------------------------------

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
    '"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def table(*rows: tuple[str, str, str]) -> str:
    """Return what ncu prints: its own lines, what the program prints, and a table."""
    kernel = '"python3","here","gemm<a, b>(""x"", 2)","1","7","(128, 1, 1)","(2, 2, 1)","0","9.0"'
    lines = [
        f'"{at}","77",{kernel},"Command line profiler metrics","{name}","{unit}","{value}"'
        for at, (name, unit, value) in enumerate(rows)
    ]
    return "\n".join(
        ["==PROF== Connected to process 77", '"half a word', HEAD, *lines, "==PROF== Over"]
    )


READ, WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"


def test_the_table_of_ncu_is_added_up(kit: Kit) -> None:
    text = table(
        (READ, "byte", "1,000,000"), (WRITE, "byte", "500"),
        (READ, "Mbyte", "2.5"), (WRITE, "Kbyte", "1"), ("sm__cycles.sum", "cycle", "7"),
    )  # fmt: skip
    kernel = 'gemm<a, b>("x", 2) (2, 2, 1)'
    by_kernel = {kernel: (2, 3_500_000.0, 1_500.0)}
    assert kit.nsight.read_csv(text) == (2, 3_500_000.0, 1_500.0, by_kernel)


def test_kernels_differ_by_name_and_grid_and_those_of_most_bytes_come_first(kit: Kit) -> None:
    small = table((READ, "Mbyte", "1"), (WRITE, "byte", "0"))
    large = table((READ, "Mbyte", "3"), (WRITE, "Mbyte", "2")).replace("(2, 2, 1)", "(64, 8, 1)")
    rows = [line for line in large.splitlines() if line.startswith('"') and "Metric" not in line]
    counted = kit.nsight.read_csv("\n".join([small.replace("==PROF== Over", ""), *rows]))
    assert [(name[-10:], one.num) for name, one in counted.by_kernel.items()] == [
        ("(64, 8, 1)", 1), (" (2, 2, 1)", 1),
    ]  # fmt: skip
    first, second = kit.bytes.kernel_lines(counted)
    assert "1 x     3.0 MB read,     2.0 written" in first
    assert "1 x     1.0 MB read,     0.0 written" in second


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("==ERROR== no permission", "there is no table"),
        (HEAD, "not each metric"),
        (table((READ, "byte", "1")), "not each metric"),
        (table((READ, "Gibyte", "1"), (WRITE, "byte", "1")), "unit 'Gibyte' is none of"),
        (table((READ, "byte", "n/a"), (WRITE, "byte", "1")), "n/a"),
    ],
)
def test_a_table_without_information_is_refused(kit: Kit, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        kit.nsight.read_csv(text)


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Put a program called ncu onto the path."""
    program = folder / "ncu"
    program.write_text(f"#!{script}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_a_step_is_counted_beside_its_predicted_time(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = table((READ, "byte", "900"), (WRITE, "byte", "100"))
    modelled = {"num_layers": 4, "bytes": 960, "gather_bytes": 40}
    pretend(
        monkeypatch,
        tmp_path,
        f"{sys.executable}\nimport sys, pathlib, json\n"
        "assert '--cache-control' in sys.argv and '--clock-control' in sys.argv\n"
        f"pathlib.Path(sys.argv[-1]).write_text(json.dumps({modelled}))\n"
        f"print({text!r})\n",
    )
    assert kit.nsight.count_step("random:tiny", "decode", limit_s=60) == (
        (1, 900.0, 100.0, {'gemm<a, b>("x", 2) (2, 2, 1)': (1, 900.0, 100.0)}),
        modelled,
    )
    row = kit.bytes.against("decode", counted_bytes=1000.0, modelled=modelled, pm_over_model=1.05)
    assert row["model_over_ncu"] == pytest.approx(0.96)
    assert row["model_and_gather_over_ncu"] == pytest.approx(1.0)
    assert row["pm_over_ncu"] == pytest.approx(1.008)
    assert row["model_over_pm"] == pytest.approx(1 / 1.05)
    assert row["is_model_within"] is row["is_pm_within"] is True
    without = kit.bytes.against(
        "decode", counted_bytes=1100.0, modelled=modelled, pm_over_model=None
    )
    assert without["is_model_within"] is False
    assert without["pm_over_ncu"] is without["is_pm_within"] is None
    line = kit.bytes.line_of("ncu decode", without | {"num_kernels": 1})
    assert "4 layers, 1 kernels" in line
    assert "PM/ncu - (unknown whether within 3%)" in line


def test_ncu_is_found_beside_cuda_the_newest_of_several(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kit.nsight.find_ncu(tmp_path) is None

    def installed(name: str, mode: int = 0o755) -> str:
        program = tmp_path / name
        program.parent.mkdir(parents=True)
        program.touch()
        program.chmod(mode)
        return str(program)

    alone = [installed(f"opt/nvidia/nsight-compute/{of}/ncu") for of in ("2024.3.2", "2023.10.1")]
    assert kit.nsight.find_ncu(tmp_path) == alone[0]
    beside = [installed(f"usr/local/cuda{of}/bin/ncu") for of in ("", "-12.10", "-12.9")]
    installed("usr/local/cuda-13.0/bin/ncu", mode=0o644)
    assert kit.nsight.find_ncu(tmp_path) == beside[1]


def test_ncu_that_takes_too_long_is_ended_with_all_that_it_began(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_path = tmp_path / "pid"
    profiled = "echo '==PROF== Profiling \"gemm\" - 0: 0%....100% - 1 pass'\n" * 2
    pretend(
        monkeypatch, tmp_path, f"/bin/sh\nsleep 600 &\necho $! > '{pid_path}'\n{profiled}wait\n"
    )
    with pytest.raises(kit.part.Unmet, match="than 3 s, it had reported 2 kernels"):
        kit.nsight.count_step("random:tiny", "decode", limit_s=3)
    assert has_ended(int(pid_path.read_text()))


def has_ended(pid: int) -> bool:
    """Return whether a process ends within 30 s."""
    until_s = time.monotonic() + 90
    while time.monotonic() < until_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


# --- work of known size -----------------------------------------------------------------------


def test_gathers_are_modelled_as_the_engine_makes_them(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = kit.part.Setting("cpu", kit.part.TINY, 1.0, is_dry=True)
    engine = kit.load.open_engine(setting, num_blocks=1)
    copied = [0]
    select = torch.index_select

    def spied(*given: Any, **named: Any) -> Any:
        found = select(*given, **named)
        if "out" in named:
            copied[0] += 2 * found.numel() * found.element_size()
        return found

    monkeypatch.setattr(torch, "index_select", spied)
    for batch, context, is_gathered in ((1, 40, False), (3, 29, True), (4, 64, True)):
        decoding = kit.load.Decoding(engine, batch=batch, context=context)
        copied[0] = 0
        phase = decoding.run(7)
        assert phase.gather_bytes == copied[0]
        assert (phase.gather_bytes > 0) is is_gathered
        decoding.close()
    copied[0] = 0
    assert kit.load.prefill(engine, num_tokens=48, num_prompts=2).gather_bytes == copied[0] == 0


def test_the_probes_calls_are_timed_with_all_of_the_batch_decoding(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    part = importlib.import_module("probe_overhead")
    setting = kit.part.Setting("cpu", kit.part.TINY, 1.0, is_dry=True)
    engine = kit.load.open_engine(setting, num_blocks=1)
    num_left = list[int]()
    close = part.Decoding.close

    def closed(decoding: Any) -> None:
        num_left.append(len(engine.scheduler.running))
        close(decoding)

    monkeypatch.setattr(part.Decoding, "close", closed)
    probe = Probe.open(EngineInfo(0, "bench"))
    try:
        part.calls_ns(engine, probe, 2)
    finally:
        probe.close()
    assert num_left == [2]


class Constant:
    """A sampler that tells of a device that moves as many bytes in every window, since 2 s ago."""

    WINDOW_BYTES = 1e6

    def __init__(self, counters: str, *, pm_despite: tuple[str, ...] = ()) -> None:
        self._began_ns = time.monotonic_ns() - 2_000 * MS
        self.refresh()

    def __enter__(self) -> Constant:
        return self

    def __exit__(self, *error: object) -> None:
        self.refresh()

    def refresh(self) -> None:
        num = (time.monotonic_ns() + 10 * MS - self._began_ns) // WINDOW_NS
        starts = [self._began_ns + at * WINDOW_NS for at in range(num)]
        words = ("dram_read_bytes", "dram_write_bytes")
        self._sample = CounterSample(
            starts[-1] + WINDOW_NS,
            "GPU-1",
            starts[0],
            starts[-1] + WINDOW_NS,
            "pm",
            dict.fromkeys(words, num * self.WINDOW_BYTES),
            starts_ns=array("q", starts).tobytes(),
            ends_ns=array("q", [at + WINDOW_NS for at in starts]).tobytes(),
            series={word: array("f", [self.WINDOW_BYTES] * num).tobytes() for word in words},
        )

    def of(self, source: str) -> list[CounterSample]:
        return [self._sample]


def watch(monkeypatch: pytest.MonkeyPatch, part: ModuleType) -> list[weakref.ref[Any]]:
    """Track the models that a part loads: a reference to one keeps its weights alive."""
    models: list[weakref.ref[Any]] = []
    open_engine = part.open_engine

    def opened(*given: Any, **named: Any) -> Any:
        engine = open_engine(*given, **named)
        models.append(weakref.ref(engine.model))
        return engine

    monkeypatch.setattr(part, "open_engine", opened)
    return models


def shrink(monkeypatch: pytest.MonkeyPatch, part: ModuleType) -> None:
    """Replace part (c)'s load by one for a CPU and a sampler that needs no GPU."""
    monkeypatch.setattr(part, "Sampler", Constant)
    for name, value in (
        ("_DECODES", ((1, 32), (4, 32), (70, 32))), ("_PREFILLS", (64,)), ("DECODE_BATCH", 4),
        ("DECODE_CONTEXT", 32), ("PREFILL_TOKENS", 64), ("_TURNS_S", 0.0), ("_LEAST_TURNS", 2),
    ):  # fmt: skip
        monkeypatch.setattr(part, name, value)


def test_nsight_compute_sees_few_layers_and_is_held_against_what_pm_saw_of_them(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, counted = kit.bytes, list[str]()

    def count_step(model: str, phase: str, *, limit_s: float) -> tuple[Any, dict[str, Any]]:
        counted.append(model)
        modelled = {"num_layers": 4, "bytes": 960, "gather_bytes": 40}
        return kit.nsight.Counted(7, 900.0, 300.0, {}), modelled

    shrink(monkeypatch, part)
    monkeypatch.setattr(part, "count_step", count_step)
    monkeypatch.setattr(kit.part.Setting, "need_gpu", lambda setting: None)
    bank = kit.part.Bank()
    whole = kit.part.TINY.replace("layers=2", "layers=9")
    part.measure(kit.part.Setting("cpu", whole, 1.0, is_dry=True), bank)
    assert counted == [f"{whole},layers=4"] * 2
    for phase, name in (("decode", "decode 4 x 32"), ("prefill", "prefill 64")):
        row, of_pm = bank.rows[f"ncu {phase}"], bank.rows[f"4 layers, {name}"]
        assert of_pm["model_bytes"] < bank.rows[name]["model_bytes"]
        assert row["pm_over_ncu"] == pytest.approx(of_pm["pm_over_model"] * 0.8)
        assert (row["num_layers"], row["model"]) == (4, f"{whole},layers=4")


def test_a_model_that_has_few_layers_or_is_a_folder_is_counted_whole(kit: Kit) -> None:
    few_layers = importlib.import_module("one_step").few_layers
    assert few_layers("random:llama-8b") == "random:llama-8b,layers=4"
    assert few_layers("random:llama-8b,layers=12") == "random:llama-8b,layers=12,layers=4"
    for whole in ("builtin", "/models/llama", "random:llama-8b,layers=3"):
        assert few_layers(whole) == whole


def test_weights_are_gone_before_nsight_compute_brings_its_own(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = kit.bytes
    models = watch(monkeypatch, part)
    shrink(monkeypatch, part)
    bank = kit.part.Bank()
    setting = kit.part.Setting("cpu", kit.part.TINY, 1.0, is_dry=True)
    with bank.row("pm"):
        part.by_counters(setting, bank)
    kit.part.release()
    assert [model() for model in models] == [None]
    with bank.row("100 ms regression"):
        part.by_regression(setting, bank)
    assert list(bank.rows) == ["decode 1 x 32", "decode 4 x 32", "prefill 64"]
    row = bank.rows["decode 4 x 32"]
    assert row["pm_bytes"] == pytest.approx(
        2 * Constant.WINDOW_BYTES * row["step_ms"] * MS / WINDOW_NS, rel=0.01
    )
    result = bank.finish("dry")
    # 70 requests never run at once, and eleven turns of a tiny model are over in no time.
    assert list(result["broken"]) == ["decode 70 x 32"]
    assert "windows of 100 ms, 50 are needed" in result["unmet"]["100 ms regression"]


def test_weights_are_gone_before_transformers_brings_its_own(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = importlib.import_module("e_engine")
    models = watch(monkeypatch, part)
    ceilings = part.Ceilings(1e10, 1e10, 1e-6, {})
    bank = kit.part.Bank()
    setting = kit.part.Setting("cpu", kit.part.TINY, 1.0, is_dry=True)
    config, _ = part.engine_steps(setting, bank, ceilings)
    kit.part.release()
    assert [model() for model in models] == [None]
    assert config.num_layers == 2
    assert list(bank.rows) == [
        "decode 1",
        "decode 4",
        "prefill 64",
        "capture",
        "eager 1",
        "eager 4",
    ]
    assert bank.rows["decode 4"]["mfu"] is None  # no ceiling was measured for its dtype
    assert "MFU -" in bank.finish("dry")["lines"][0]


def test_the_first_steps_to_be_taken_apart_are_of_all_sizes(kit: Kit) -> None:
    served = importlib.import_module("served")
    shapes = served.step_shapes(random.Random("gpu shapes"), 24)
    ordered = kit.ablation.interleaved(shapes)
    assert sorted(map(id, ordered)) == sorted(map(id, shapes))
    sizes = [len(shape.parts) for shape in ordered[:5]]
    assert min(sizes) <= 6
    assert max(sizes) >= 32
    assert any(6 < size < 32 for size in sizes)


def test_gpm_read_too_fast_is_recognized_by_its_new_samples(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording.of(H200)
    monkeypatch.setattr(pynvml, "nvmlLib", RecordedLibrary(recording))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    for at, turn in enumerate(recording.document["devices"][0]["turns"]):
        turn["gpm"][str(pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL)] = 10.0 + at
    waited_ms = [0]

    def pause(seconds: float) -> None:
        waited_ms[0] += round(seconds * 1e3)
        recording.turn = 1 + waited_ms[0] // 100  # the driver has something new every 100 ms

    rows, line = kit.gpm.sweep((20,), pause=pause)
    row = rows["20 ms"]
    assert (row["num_reads"], row["num_failed"], row["num_zero"]) == (15, 0, 0)
    assert row["num_new"] == 4  # in 300 ms
    assert line.startswith("GPM read every 20 ms: 4 of 15 new")
    recording.unsupported.add("nvmlGpmMetricsGet")
    rows, line = kit.gpm.sweep((20,), pause=lambda seconds: None)
    assert rows["20 ms"]["num_failed"] == 15
    assert rows["20 ms"]["dram_share"] is None
    assert "- of DRAM" in line


def test_the_processor_time_of_a_process_is_the_kernels(kit: Kit) -> None:
    before_ns = time.process_time_ns()
    read_ns = kit.process_clock.process_cpu_ns(os.getpid())
    assert before_ns <= read_ns <= time.process_time_ns()
    with pytest.raises(OSError, match=r"\d"):
        kit.process_clock.process_cpu_ns(2**22 + 1)


# --- what is banked ---------------------------------------------------------------------------


def test_rows_stand_whatever_comes_after_them(kit: Kit, tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    seen: list[dict[str, Any]] = []

    def measure(setting: Any, bank: Any) -> None:
        bank.keep("one", {"ms": 1.0, "share": float("nan")}, "one: 1 ms")
        seen.append(json.loads(path.read_text()))
        with bank.row("two"):
            raise MemoryError("out of memory")
        with bank.row("three"):
            raise kit.part.Unmet("needs root")
        bank.keep("four", {"ms": 4.0}, "four: 4 ms")

    setting = kit.part.Setting("cpu", "m", 1.0, is_dry=False)
    result = kit.part.run(measure, setting, kit.part.Bank(path))
    (early,) = seen
    assert early["status"] == kit.part.UNFINISHED
    assert early["rows"] == {"one": {"ms": 1.0, "share": None}}  # there is no NaN in JSON
    assert result == json.loads(path.read_text())
    assert result["status"] == "failed"
    assert result["reason"] == "two: MemoryError: out of memory"
    assert "MemoryError" in result["broken"]["two"]["trace"]
    assert list(result["rows"]) == ["one", "four"]
    assert result["lines"] == [
        "one: 1 ms", "two: FAILED, MemoryError: out of memory", "three: needs root", "four: 4 ms",
    ]  # fmt: skip


def test_a_part_without_what_it_needs_is_unmet_and_one_that_breaks_failed(kit: Kit) -> None:
    setting = kit.part.Setting("cpu", "m", 1.0, is_dry=False)

    def unmet(setting: Any, bank: Any) -> None:
        setting.need_gpu()

    def broken(setting: Any, bank: Any) -> None:
        bank.keep("one", {}, "one")
        raise RuntimeError("device lost")

    result = kit.part.run(unmet, setting, kit.part.Bank())
    assert (result["status"], result["reason"]) == ("unmet", "needs an NVIDIA GPU")
    result = kit.part.run(broken, setting, kit.part.Bank())
    assert (result["status"], result["reason"]) == ("failed", "RuntimeError: device lost")
    assert result["rows"] == {"one": {}}


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the report without a GPU")
@pytest.mark.parametrize("user", [None, 65534])
def test_a_sampler_is_read_while_it_runs_and_its_cost_leaves_out_how_it_began(
    kit: Kit, user: int | None
) -> None:
    if user is not None and os.geteuid() != 0:
        pytest.skip("only root can switch to another user")
    despite = ("nv-hostengine", "ncu")
    with kit.watched.Sampler("gpm,pm", user=user, pm_despite=despite) as sampler:
        pid, began_ns = sampler._process.pid, time.monotonic_ns()
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        to_begin_ns = kit.process_clock.process_cpu_ns(pid)
        reasons = {one.source for one in sampler.samples if one.reason}
        sampler.refresh()
        owner = Path(f"/proc/{pid}").stat().st_uid
    assert reasons == {"gpm", "pm"}
    assert words[-5:-1] == ["--pm-despite", "nv-hostengine", "--pm-despite", "ncu"]
    assert owner == (os.geteuid() if user is None else user)
    assert 0 <= sampler.cpu_share * (time.monotonic_ns() - began_ns) < to_begin_ns
    with pytest.raises(kit.part.Unmet, match="pm: "):
        sampler.of("pm")
    assert has_ended(pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives up a capability")
@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the report without a GPU")
def test_root_keeps_cap_sys_admin_where_cupti_refuses_cap_perfmon(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = kit.watched.Sampler
    refusals = ["cuptiPmSamplingEnable failed: CUPTI_ERROR_UNKNOWN (999)"]
    monkeypatch.setattr(sampler, "refused_with_perfmon", "")
    monkeypatch.setattr(sampler, "_refusal", lambda self: refusals.pop() if refusals else "")
    with sampler("gpm,pm") as first:
        pass
    with sampler("gpm,pm") as second:
        pass
    assert first.refused_with_perfmon == "cuptiPmSamplingEnable failed: CUPTI_ERROR_UNKNOWN (999)"
    rights = [line for line in first.lines + second.lines if "switched to uid" in line]
    if "CAP_PERFMON" in rights[0]:  # of the three processes, the first
        assert [line.rpartition(", ")[2] for line in rights] == [
            "with CAP_PERFMON only", "with CAP_SYS_ADMIN only", "with CAP_SYS_ADMIN only",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "is_of_cupti"),
    [
        (NOT_PERMITTED, True),
        ("the counters are in use. (cuptiPmSamplingEnable failed: X (26))", True),
        ("no NVIDIA driver found (libcuda.so.1).", False),
        ("cannot load libcupti from /x", False),
    ],
)
def test_only_what_cupti_refuses_is_tried_with_more_rights(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, reason: str, is_of_cupti: bool
) -> None:
    sampler = kit.watched.Sampler("gpm")
    sampler._folder.cleanup()
    sampler.samples = [CounterSample(1, "", 1, 1, "pm", {}, reason=reason)]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert (sampler._refusal() == reason) is is_of_cupti
    assert (sampler._refusal() == "") is not is_of_cupti
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert sampler._refusal() == ""


def test_an_engine_that_fails_on_a_gpu_runs_without_graphs_then_without_triton(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    part, tries = kit.load, list[tuple[bool, bool]]()
    config, device = SimpleNamespace(head_dim=64), torch.device("cuda")
    monkeypatch.setattr(part.devices, "has_triton", lambda: True)

    def load_engine(model: str, options: EngineOptions) -> str:
        tries.append((options.cuda_graphs, part.runner.has_kernels(config, device)))
        return "engine"

    def tried(engine: str) -> str:
        if len(tries) < fails_until:
            raise RuntimeError("no such instruction")
        return engine

    monkeypatch.setattr(part, "load_engine", load_engine)
    monkeypatch.setattr(part, "tried", tried)
    setting = kit.part.Setting("cuda:0", "random:tiny", 1.0, is_dry=False)
    fails_until = 1
    assert part.open_engine(setting, num_blocks=8) == "engine"
    assert (tries, capsys.readouterr().out) == ([(True, True)], "")
    tries.clear()
    fails_until = 2
    assert part.open_engine(setting, num_blocks=8) == "engine"
    assert tries == [(True, True), (False, True)]
    assert capsys.readouterr().out == "no CUDA graphs here: RuntimeError: no such instruction\n"
    tries.clear()
    fails_until = 3
    assert part.open_engine(setting, num_blocks=8, cuda_graphs=False) == "engine"
    assert tries == [(False, True), (False, False)]
    assert "no Triton kernels here: " in capsys.readouterr().out


def test_a_tried_engine_has_decoded_a_step_and_is_idle_again(kit: Kit) -> None:
    setting = kit.part.Setting("cpu", kit.part.TINY, 1.0, is_dry=True)
    engine, sampled = kit.load.open_engine(setting, num_blocks=8), list[int]()
    step = engine.step
    engine.step = lambda: sampled.append(len(engine.scheduler.running)) or step()
    assert kit.load.tried(engine) is engine
    assert sampled.count(1) >= 1
    assert not engine.has_work
