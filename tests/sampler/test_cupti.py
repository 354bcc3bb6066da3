from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inferscope.records import COUNTERS
from inferscope.sampler import privilege
from inferscope.sampler.claims import NoClaims
from inferscope.sampler.cuda_driver import uuid_text
from inferscope.sampler.cupti import layout
from inferscope.sampler.cupti import library as cupti
from inferscope.sampler.cupti import pm as cupti_pm
from inferscope.sampler.cupti.library import (
    OLDEST_VERSION,
    Cupti,
    CuptiError,
    cuda_release,
    describe_error,
    may_profile,
)
from inferscope.sampler.cupti.pm import CuptiPmSource
from inferscope.sampler.cupti.session import choose_metrics, missing, whole
from inferscope.sampler.source import Unavailable
from tests.probe.fakes import FakeClock
from tests.sampler.cupti_releases import RELEASES, library_of

EXPECTED = json.loads((Path(__file__).parent / "recordings" / "cupti_13.0.json").read_text())[
    "structs"
]
KINDS = {
    kind.C_NAME: kind
    for kind in vars(layout).values()
    if isinstance(kind, type) and issubclass(kind, layout.Params) and kind is not layout.Params
    if kind is not layout.HostInitialize56
}
OFFLINE = range(OLDEST_VERSION, 130_200)
"""Versions whose host functions work without a driver."""
_LIBRARIES = [
    str(release.library)
    for release in reversed(RELEASES)
    if release.version in OFFLINE and release.library is not None
]
LIBRARY = os.environ.get("INFERSCOPE_CUPTI") or next(iter(_LIBRARIES), "")
needs_library = pytest.mark.skipif(
    not LIBRARY, reason="there is no libcupti (INFERSCOPE_CUPTI, INFERSCOPE_CUPTI_WHEELS)"
)
CHIPS = ("GA100", "GA102", "AD102", "GH100", "GB100", "GB202")


@pytest.mark.parametrize("name", EXPECTED)
def test_a_structure_stands_in_memory_as_the_headers_have_it(name: str) -> None:
    kind, expected = KINDS[name], EXPECTED[name]
    assert ctypes.sizeof(kind) == expected["sizeof"]
    assert layout.struct_size(kind) == expected["struct_size"]
    fields = [(getattr(kind, field).offset, getattr(kind, field).size) for field, _ in names(kind)]
    assert fields == [(offset, size) for _, offset, size in expected["fields"]]
    ours = [field for field, _ in names(kind)]
    theirs = [field for field, _, _ in expected["fields"]]
    assert ours == [field.replace("pMetricNames", "pMetricNames") for field in theirs]


def names(kind: type[layout.Params]) -> list[tuple[str, object]]:
    return [(field[0], field[1]) for field in kind._fields_]


def test_sizes_end_with_the_last_field_and_not_with_the_padding() -> None:
    assert layout.struct_size(layout.Decode) == 45
    assert ctypes.sizeof(layout.Decode) == 48


def test_the_one_structure_that_grew_is_chosen_by_what_the_library_has() -> None:
    old = layout.host_initialize(has_single_pass_sets=False)
    new = layout.host_initialize(has_single_pass_sets=True)
    assert (layout.struct_size(old), layout.struct_size(new)) == (48, 56)
    for field, _ in names(old):
        assert getattr(old, field).offset == getattr(new, field).offset


JOINED = {
    "busy_share", "sm_active_share", "tensor_share",
    "dram_share", "dram_read_bytes", "dram_write_bytes",
}  # fmt: skip
ABSENT = {
    "AD102": {"nvlink_receive_bytes", "nvlink_send_bytes"},
    "GB100": {"pcie_read_bytes", "pcie_write_bytes"},
    "GB202": {"nvlink_receive_bytes", "nvlink_send_bytes"},
}
"""Words for which a chip has no metric."""


@needs_library
@pytest.mark.parametrize("chip", CHIPS)
def test_a_chip_counts_our_metrics_in_one_pass(chip: str) -> None:
    metrics = choose_metrics(Cupti(LIBRARY), chip, None)
    assert set(missing(metrics)) == ABSENT.get(chip, set())
    assert metrics.by_word.keys() >= JOINED
    assert metrics.by_word.keys() <= COUNTERS.keys()
    is_new = chip.startswith("GB20")
    assert metrics.by_word["dram_read_bytes"] == (
        "dram__bytes_op_read.sum" if is_new else "dram__bytes_read.sum"
    )
    assert len(metrics.config) > 100


ASK = """
import sys
from inferscope.sampler.cupti.library import Cupti
from inferscope.sampler.cupti.session import choose_metrics, missing
from inferscope.sampler.source import Unavailable
cupti = Cupti(sys.argv[1])
print(*missing(choose_metrics(cupti, "GH100", None)))
try:
    cupti.begin()
except Unavailable as reason:
    print(reason)
"""


def asked(version: int) -> list[str]:
    """Return the facts of a release on GH100, in a process of its own.

    In one that has another release loaded, the libraries of that one would answer.
    """
    library = library_of(version)
    if library is None:
        pytest.skip(f"no libcupti of version {version} (INFERSCOPE_CUPTI_WHEELS)")
    command = [sys.executable, "-c", ASK, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


@pytest.mark.parametrize("version", [27, 28, 130_001])
def test_the_oldest_releases_count_all_on_gh100_in_one_pass(version: int) -> None:
    assert asked(version)[:1] == [""]


@pytest.mark.parametrize("version", [24, 26])
def test_a_release_that_knows_no_bytes_is_refused_with_what_to_install(version: int) -> None:
    lacking, reason = asked(version)
    assert {"dram_read_bytes", "dram_write_bytes"} <= set(lacking.split())
    assert f"is of CUDA {cuda_release(version)}, and PM sampling needs CUPTI of 12.9" in reason
    assert 'pip install "nvidia-cuda-cupti-cu12>=12.9"' in reason


@needs_library
def test_a_chip_that_needs_two_passes_gives_up_what_matters_least() -> None:
    metrics = choose_metrics(Cupti(LIBRARY), "TU102", None)
    assert {"dram_read_bytes", "dram_write_bytes", "sm_active_share"} <= metrics.by_word.keys()
    assert "tensor_share" not in metrics.by_word


@pytest.mark.parametrize(
    ("version", "release"),
    [(24, "12.6"), (26, "12.8"), (27, "12.9"), (28, "12.9"), (130_001, "13.0"), (130_202, "13.2")],
)
def test_a_version_is_named_by_its_cuda_release(version: int, release: str) -> None:
    assert cuda_release(version) == release
    assert cuda_release(25) == cuda_release(0) == ""


BECOME = """
import sys
from pathlib import Path
from inferscope.sampler.cupti.search import usable
from inferscope.sampler.cupti.session import choose_metrics
from inferscope.sampler.privilege import become
from inferscope.sampler.sampler import Settings, preload
from inferscope.probe.clock import SystemClock
preload(Settings(Path(sys.argv[1]), sources=("pm",)), clock=SystemClock())
become(65534, keeps_counters=True)
print(len(choose_metrics(usable(), "GH100", None).by_word))
print(*sorted({line.split()[-1] for line in open("/proc/self/maps") if "libnvperf" in line}))
"""


@needs_library
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can switch to another user")
def test_what_root_alone_may_read_is_all_loaded_before_root_is_given_up(tmp_path: Path) -> None:
    mine = Path(shutil.copy(LIBRARY, tmp_path))
    for name in ("libnvperf_host.so", "libnvperf_target.so"):
        shutil.copy(Path(LIBRARY).parent / name, tmp_path)
    assert tmp_path.stat().st_mode & 0o077 == 0
    done = subprocess.run(
        [sys.executable, "-c", BECOME, str(tmp_path / "rings")],
        env={**os.environ, "INFERSCOPE_CUPTI": str(mine)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    num_metrics, loaded = done.stdout.splitlines()
    assert num_metrics == "14"
    names = ("libnvperf_host.so", "libnvperf_target.so")
    assert loaded.split() == [str(tmp_path / name) for name in names]


@needs_library
def test_a_library_refuses_structures_of_a_wrong_size() -> None:
    library = Cupti(LIBRARY)
    params = library.HostInitialize(profilerType=1, pChipName=b"GH100")
    params.structSize = layout.struct_size(library.HostInitialize) + 8
    code = library._library.cuptiProfilerHostInitialize(ctypes.byref(params))
    assert code == layout.ERROR_INVALID_PARAMETER


@needs_library
def test_a_chip_that_does_not_exist_is_an_error_in_words() -> None:
    with pytest.raises(CuptiError, match="cuptiProfilerHostInitialize failed: CUPTI_ERROR"):
        choose_metrics(Cupti(LIBRARY), "XX999", None)


def test_only_turing_and_a100_go_by_the_system_clock() -> None:
    assert {
        chip for chip in (*CHIPS, "TU102") if layout.trigger(chip) == layout.TRIGGER_SYSCLK
    } == {
        "GA100",
        "TU102",
    }


def test_errors_state_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def described(code: int) -> str:
        return describe_error(CuptiError("cuptiPmSamplingEnable", code, "CUPTI_ERROR_SOMETHING"))

    assert "as root" in described(layout.ERROR_INSUFFICIENT_PRIVILEGES)
    assert "NVreg_RestrictProfilingToAdminUsers=0" in described(
        layout.ERROR_INSUFFICIENT_PRIVILEGES
    )
    assert "MIG" in described(layout.ERROR_MIG_NOT_SUPPORTED)
    monkeypatch.setattr(cupti, "named", lambda names: {"nv-hostengine": 812})
    assert "in use, by nv-hostengine (process 812)" in described(layout.ERROR_INVALID_OPERATION)
    monkeypatch.setattr(cupti, "named", lambda names: {})
    assert "outside this container" in described(layout.ERROR_HARDWARE_BUSY)
    for code in (1, 2, 7, 8, 26, 27, 35, 999):
        assert "\n" not in described(code)


@pytest.mark.parametrize(
    ("line", "is_allowed"),
    [("RmProfilingAdminOnly: 1", False), ("RmProfilingAdminOnly: 0", True), ("Other: 1", None)],
)
def test_right_to_profile_is_read_from_the_driver_or_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, is_allowed: bool | None
) -> None:
    monkeypatch.setattr(cupti, "may_use_counters", lambda: False)  # a user who is not root
    (tmp_path / "params").write_text(f"ResmanDebugLevel: 4294967295\n{line}\n")
    assert may_profile(tmp_path / "params") is is_allowed
    assert may_profile(tmp_path / "none") is None


@pytest.mark.parametrize("effective", [1 << 21, 1 << 38, 1 << 21 | 1 << 38])
def test_either_capability_permits_it_whatever_the_driver_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effective: int
) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr(privilege, "_STATUS", status)
    (tmp_path / "params").write_text("RmProfilingAdminOnly: 1\n")
    status.write_text(f"Name:\tpython\nCapPrm:\tffffffffff\nCapEff:\t{effective:016x}\n")
    assert may_profile(tmp_path / "params") is True
    status.write_text(f"CapEff:\t{~effective & ~(1 << 21 | 1 << 38) & (1 << 41) - 1:016x}\n")
    assert may_profile(tmp_path / "params") is False


def pm(lines: list[str], *, despite: tuple[str, ...] = ()) -> CuptiPmSource:
    return CuptiPmSource(
        NoClaims(),
        clock=FakeClock(),
        log_line=lines.append,
        period_ns=100_000_000,
        interval_ns=500_000,
        despite=despite,
        list_devices=lambda: ["GPU-1"],
        load=lambda: Cupti("/nowhere/libcupti.so"),
    )


def test_device_in_use_by_a_profiler_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupti, "named", lambda names: {"nv-hostengine": 812, "nsys": 4})
    monkeypatch.setattr(cupti_pm, "may_profile", lambda: True)
    with pytest.raises(Unavailable, match=r"nv-hostengine \(process 812\).*would blank") as refused:
        pm([]).open(0)
    assert "Stop process 4 and 812 while you sample" in str(refused.value)
    assert "--pm-despite nsys --pm-despite nv-hostengine" in str(refused.value)
    with pytest.raises(Unavailable, match=r"nsys \(process 4\) may be using"):
        pm([], despite=("nv-hostengine",)).open(0)
    with pytest.raises(Unavailable, match="cannot load libcupti from /nowhere"):
        pm([], despite=("nv-hostengine", "nsys")).open(0)


def test_without_a_library_there_is_one_line() -> None:
    source = pm([])
    with pytest.raises(Unavailable, match="cannot load libcupti from /nowhere"):
        source.open(0)
    source.close()
    source.close()


def test_windows_sum_amounts_and_weight_shares_by_time() -> None:
    columns = {"dram_read_bytes": (1.0, 2.0, 3.0), "sm_active_share": (1.0, 0.0, 0.5)}
    values = whole(columns, [0, 10, 40], [10, 40, 50])
    assert values == {"dram_read_bytes": 6.0, "sm_active_share": (10 + 5) / 50}


def test_uuids_are_written_as_the_driver_does() -> None:
    raw = bytes.fromhex("6f2a1c3e58d44b7a9c1e2f0d3b5a7e91")
    assert uuid_text(raw) == "GPU-6f2a1c3e-58d4-4b7a-9c1e-2f0d3b5a7e91"
