from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.errors import NotFound
from inferscope.metrics_page.fetching import MetricsPage, PageSample, _samples
from inferscope.records import COUNTERS
from inferscope.sampler.claims import NoClaims
from inferscope.sampler.dcgm import DcgmSource, read_page
from inferscope.sampler.source import Unavailable
from tests.metrics_page.page_server import PageServer, serving

SECOND = 1_000_000_000
LABELS = 'gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA A100-SXM4-80GB",Hostname="h"'
PAGE = """# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{{{labels}}} 1410
# TYPE DCGM_FI_DEV_POWER_USAGE gauge
DCGM_FI_DEV_POWER_USAGE{{{labels}}} 318.5
{energy_type}DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{labels}}} {energy_mj}
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{{{labels}}} 71234
# TYPE DCGM_FI_PROF_SM_ACTIVE gauge
DCGM_FI_PROF_SM_ACTIVE{{{labels}}} {sm}
# TYPE DCGM_FI_PROF_DRAM_ACTIVE gauge
DCGM_FI_PROF_DRAM_ACTIVE{{{labels}}} 0.613
# TYPE DCGM_FI_PROF_PIPE_TENSOR_ACTIVE gauge
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{labels}}} 1.4073748835532800e+14
DCGM_FI_PROF_SM_ACTIVE{{{labels},GPU_I_PROFILE="3g.40gb",GPU_I_ID="1"}} 0.9
"""
"""As dcgm-exporter 3 and 4 write it; the tensor pipe has DCGM's number for none."""


@pytest.fixture
def server() -> Iterator[PageServer]:
    with serving(page(0.4, 1000)) as server:
        yield server


def page(sm: float, energy_mj: int, *, is_typed: bool = True) -> str:
    typed = "# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter\n" if is_typed else ""
    return PAGE.format(labels=LABELS, sm=sm, energy_mj=energy_mj, energy_type=typed)


def source(server: PageServer, *, wanted: tuple[str, ...] = ()) -> DcgmSource:
    return DcgmSource(NoClaims(), period_ns=1, url=f"{server.url}/metrics", wanted=wanted)


@pytest.mark.parametrize("is_typed", [True, False])
def test_page_is_read_in_our_keys_and_units(server: PageServer, is_typed: bool) -> None:
    server.content = page(0.4, 1000, is_typed=is_typed)
    reader = source(server)
    (opened,) = reader.open(5 * SECOND)
    assert opened.device_uuid == "GPU-1"
    assert opened.facts["name"] == "NVIDIA A100-SXM4-80GB"
    server.content = page(0.7, 1500, is_typed=is_typed)
    (one,) = reader.read(7 * SECOND)
    assert (one.start_ns, one.end_ns) == (5 * SECOND, 7 * SECOND)
    assert one.values == {
        "sm_clock_mhz": 1410,
        "power_w": 318.5,
        "memory_used_bytes": 71234 * 2**20,
        "sm_active_share": 0.7,
        "dram_share": 0.613,
        "energy_uj": 500_000,
    }
    assert one.values.keys() <= COUNTERS.keys()


def test_a_window_lies_between_two_pages_that_differ(server: PageServer) -> None:
    reader = source(server)
    reader.open(0)
    assert reader.read(1 * SECOND) == []
    assert reader.read(2 * SECOND) == []
    server.content = page(0.5, 1000)
    (one,) = reader.read(3 * SECOND)
    assert (one.start_ns, one.end_ns) == (0, 3 * SECOND)
    server.content = page(0.6, 900)  # the driver was loaded anew
    (one,) = reader.read(4 * SECOND)
    assert (one.start_ns, one.end_ns) == (3 * SECOND, 4 * SECOND)
    assert "energy_uj" not in one.values


def test_a_page_without_profiling_metrics_states_how_to_have_them(server: PageServer) -> None:
    server.content = (
        "\n".join(line for line in page(0, 0).splitlines() if "PROF" not in line) + "\n"
    )
    (opened,) = source(server).open(0)
    assert "counters file" in opened.facts["missing"]


def test_a_page_of_other_devices_is_none_of_ours(server: PageServer) -> None:
    with pytest.raises(Unavailable, match="no device that this sampler"):
        source(server, wanted=("GPU-2",)).open(0)
    server.content = "process_cpu_seconds_total 1\n"
    with pytest.raises(Unavailable, match="no device that this sampler"):
        source(server).open(0)


def test_missing_exporter_is_one_line() -> None:
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"no dcgm-exporter answers at http://127.0.0.1:1/metr"):
        DcgmSource(NoClaims(), period_ns=1, url="http://127.0.0.1:1/metrics").open(0)
    assert time.monotonic() - began < 10


@given(
    st.lists(
        st.builds(
            PageSample,
            st.sampled_from(["DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_DEV_FB_USED", "up"]),
            st.dictionaries(st.sampled_from(["UUID", "GPU_I_ID", "modelName"]), st.text()),
            st.floats(),
        )
    )
)
def test_whatever_stands_on_a_page_gives_numbers_or_nothing(samples: list[PageSample]) -> None:
    for name, numbers in read_page(MetricsPage("", 0, 0, tuple(samples))).values():
        assert isinstance(name, str)
        assert all(0 <= number < 2**47 for number in numbers.values())


@given(st.binary(max_size=400), st.integers(0, 500), st.integers(0, 500))
def test_a_damaged_page_is_read_or_refused(noise: bytes, start: int, length: int) -> None:
    content = page(0.4, 1000).encode()
    damaged = content[:start] + noise + content[start + length :]
    try:
        samples = _samples("http://here", damaged)
    except NotFound:
        return
    read_page(MetricsPage("", 0, 0, samples))
