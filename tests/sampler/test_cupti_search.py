"""The search for a CUPTI that works, over libraries that refuse, crash or are too old.

They are compiled here, a few lines each, and so is a driver: no part of NVIDIA's is needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from inferscope.sampler.cupti import search as cupti_search
from inferscope.sampler.cupti.library import LIBRARY_VARIABLE
from inferscope.sampler.cupti.search import candidates, try_library, usable
from inferscope.sampler.source import Unavailable
from tests.sampler.cupti_releases import library_of

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
LIBRARY = """
#include <string.h>
int cuptiGetVersion(unsigned *version) { *version = %(version)d; return 0; }
int cuptiGetResultString(int code, const char **text) { *text = "CUPTI_ERROR_TOY"; return 0; }
int cuptiProfilerInitialize(void *params) { %(initialize)s }
int cuptiProfilerDeInitialize(void *params) { return 0; }
int cuptiPmSamplingEnable(void *params) { return 1; }
"""
DRIVER = """
int cuInit(unsigned flags) { return %(code)d; }
int cuDeviceGetCount(int *number) { *number = 0; return 0; }
"""
WORKS, REFUSES, CRASHES = "return 0;", "return 15;", "return *(volatile int *)0;"
IN_13, IN_12 = "new/libcupti.so.13", "old/libcupti.so.12"
Build = Callable[..., str]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Build libraries into a folder that is searched, beside a driver, and no other is."""
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(cupti_search, "_TOOLKITS", ())
    monkeypatch.setattr(cupti_search, "_IN_SITE_PACKAGES", ())
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:{tmp_path / 'old'}:{tmp_path / 'new'}")

    def compiled(source: str, path: Path) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        command = ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(path)]
        subprocess.run(command, input=source, text=True, check=True)
        return str(path)

    compiled(DRIVER % {"code": 0}, tmp_path / "libcuda.so.1")
    monkeypatch.setattr(cupti_search, "load_driver", lambda: None)  # found by the children alone

    def built(place: str, *, initialize: str = WORKS, version: int = 130_001) -> str:
        source = LIBRARY % {"initialize": initialize, "version": version}
        return compiled(source, tmp_path / place)

    return built


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize(
    ("initialize", "version", "reason"),
    [
        (REFUSES, 130_001, "cuptiProfilerInitialize failed: CUPTI_ERROR_TOY (15)"),
        (CRASHES, 130_202, "crashed the process that tried it (signal 11)"),
        (WORKS, 26, "belongs to CUDA 12.8; PM sampling needs CUPTI 12.9"),
    ],
)
def test_a_library_that_cannot_initialise_is_passed_over_for_the_next(
    build: Build, initialize: str, version: int, reason: str
) -> None:
    bad = build(IN_13, initialize=initialize, version=version)
    good = build(IN_12, version=28)
    assert candidates() == [bad, good]
    assert reason in try_library(bad).reason
    assert usable().path == good
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert good in loaded
    assert bad not in loaded
    assert usable() is usable()  # decided once


@needs_compiler
def test_where_none_works_each_reason_is_given(build: Build) -> None:
    paths = [build(IN_13, initialize=REFUSES), build(IN_12, initialize=CRASHES)]
    with pytest.raises(Unavailable) as refused:
        usable()
    assert all(path in str(refused.value) for path in paths)
    assert "\n" not in str(refused.value)


@needs_compiler
def test_modules_in_the_current_folder_are_not_imported_by_the_child(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build(IN_13)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "msgspec.py").write_text("raise SystemExit('of the current folder')")
    monkeypatch.chdir(tmp_path / "here")
    trial = try_library(os.path.relpath(path))
    assert trial == (path, "", 130_001, {})


@needs_compiler
def test_one_that_is_found_twice_is_tried_once_and_one_that_is_named_is_the_only_one(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(IN_13)
    (tmp_path / "libcupti.so.13").symlink_to(first)
    assert candidates() == [str(tmp_path / "libcupti.so.13")]
    monkeypatch.setenv(LIBRARY_VARIABLE, "/nowhere/libcupti.so")
    assert candidates() == ["/nowhere/libcupti.so"]
    with pytest.raises(Unavailable, match="cannot load libcupti from /nowhere"):
        usable()


def test_wheels_and_toolkits_are_searched_and_13_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(cupti_search, "_TOOLKITS", (f"{tmp_path}/cuda*/lib64",))
    monkeypatch.syspath_prepend(str(tmp_path))
    places = (
        "nvidia/cu13/lib/libcupti.so.13", "cuda-13.1/lib64/libcupti.so.13",
        "nvidia/cuda_cupti/lib/libcupti.so.12",
    )  # fmt: skip
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).touch()
    found = [path for path in candidates() if path.startswith(str(tmp_path))]
    assert found == [str(tmp_path / place) for place in places]


def test_where_there_is_none_that_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(cupti_search, "_TOOLKITS", ())
    monkeypatch.setattr(cupti_search, "_IN_SITE_PACKAGES", ())
    with pytest.raises(Unavailable, match="no libcupti found"):
        usable()


PRELOAD = """
import sys
from pathlib import Path
from inferscope.sampler.sampler import Settings, preload
from inferscope.probe.clock import SystemClock
preload(Settings(Path(sys.argv[1]), sources=("pm",)), clock=SystemClock())
print(*sorted({line.split()[-1] for line in open("/proc/self/maps") if "libcupti" in line}))
"""


def test_a_release_that_crashes_without_a_driver_does_not_end_the_sampler(tmp_path: Path) -> None:
    library = library_of(130_202)
    if library is None:
        pytest.skip("no libcupti of CUDA 13.2 (INFERSCOPE_CUPTI_WHEELS)")
    done = subprocess.run(
        [sys.executable, "-c", PRELOAD, str(tmp_path)],
        env={**os.environ, LIBRARY_VARIABLE: str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(library)  # loaded, and nothing in it called
