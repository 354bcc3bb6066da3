from __future__ import annotations

from dataclasses import replace

import pytest

from inferscope.fold.snapshots import CountersView, PhaseUse
from inferscope.text.panels.peaks import format_peaks
from tests.tui.scenes import engine_view

USE = {"decode": PhaseUse(None, None, 2.9e12, 0.1e12, None)}
MEMORY, COMPUTE = {"spec": 4.8e12, "measured": 4e12}, {"spec": 1e15, "measured": 8e14}


@pytest.mark.parametrize(
    ("flops_s", "counters", "words"),
    [
        (4e14, CountersView(use=USE, memory_peaks_bytes_s=MEMORY, compute_peaks_flops_s=COMPUTE),
         "MFU 40/50%  MBU 62/75%"),
        (4e14,
         CountersView(use=USE, memory_peaks_bytes_s={"measured": 4e12},
                      compute_peaks_flops_s={"spec": 1e15}),
         "MFU 40/-%  MBU -/75%"),
        (4e14, CountersView(memory_peaks_bytes_s=MEMORY, compute_peaks_flops_s=COMPUTE),
         "MFU 40/50%"),
        (None, CountersView(use=USE, memory_peaks_bytes_s=MEMORY), "MBU 62/75%"),
        (None, CountersView(compute_peaks_flops_s=COMPUTE), ""),
    ],
)  # fmt: skip
def test_utilisation_is_of_both_peaks_and_one_without_a_rate_or_peak_is_left_out(
    flops_s: float | None, counters: CountersView, words: str
) -> None:
    view = replace(engine_view(0), prefill_flops_s=flops_s, counters=counters)
    assert format_peaks(view) == words


def test_phase_with_only_reads_sampled_has_no_traffic() -> None:
    use = {"decode": PhaseUse(None, None, 2.9e12, None, None)}
    counters = CountersView(use=use, memory_peaks_bytes_s=MEMORY)
    view = replace(engine_view(0), prefill_flops_s=None, counters=counters)
    assert "MBU" not in format_peaks(view)
