"""Roofline screen on a recording, and its numbers against the steps of the same recording."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from inferscope.fold import EngineView, Snapshot
from inferscope.fold.snapshots import CountersView
from inferscope.text.lines import text_of, width_of
from inferscope.text.panels.roofline import (
    kind_panel,
    kind_table,
    moves,
    moves_panel,
    provenance,
    roof_of,
    roofline_chart,
)
from tests.recorded import recorded
from tests.tui.live_screen import assert_golden, play, screen
from tests.tui.scenes import engine_view

WIDE, NARROW = (120, 40), (80, 24)
PEAKS = CountersView(
    memory_peaks_bytes_s={"measured": 9e9, "spec": 12e9},
    compute_peaks_flops_s={"measured": 55e9, "spec": 80e9},
)
FACTORS = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}


def calibrated(counters: CountersView = PEAKS) -> Snapshot:
    snapshot = recorded()[0]
    return replace(snapshot, engines=(replace(snapshot.engines[0], counters=counters),))


def view() -> EngineView:
    return calibrated().engines[0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "size", "is_ascii", "is_calibrated"),
    [
        ("roofline_120x40", WIDE, False, True),
        ("roofline_80x24", NARROW, False, True),
        ("roofline_ascii_120x40", WIDE, True, True),
        ("roofline_no_peak_120x40", WIDE, False, False),
        ("roofline_no_peak_80x24", NARROW, False, False),
    ],
)
def test_the_roofline_looks_like_its_golden(
    name: str, size: tuple[int, int], is_ascii: bool, is_calibrated: bool
) -> None:
    snapshot = calibrated() if is_calibrated else recorded()[0]

    async def scenario() -> None:
        async with screen(snapshot, size=size, ascii=is_ascii) as running:
            await running.press("4")
            assert [len(line) for line in running.lines] == [size[0]] * size[1]
            if is_ascii:
                assert running.text.isascii()
            assert_golden(name, running.text)

    play(scenario)


@pytest.mark.parametrize("kind", ["prefill", "decode", "mixed"])
def test_each_number_of_a_kind_is_that_of_its_warm_steps(kind: str) -> None:
    steps = [step for step in view().steps if step.kind == kind and not step.is_cold]
    time_s = sum(step.device_ns for step in steps) / 1e9
    flops = sum(step.flops or 0 for step in steps)
    moved = sum((step.read_bytes or 0) + (step.write_bytes or 0) for step in steps)
    panel = kind_panel(roof_of(view()), kind, 40, 10)
    text = "\n".join(text_of(line) for line in panel)
    assert f"{len(steps)} steps" in text
    for unit, exact, peak, other in (
        ("FLOP/s", flops / time_s, 55e9, 80e9),
        ("B/s", moved / time_s, 9e9, 12e9),
    ):
        ((number, prefix),) = re.findall(rf"([0-9.]+) ([TGMk]?){unit}\b", text)
        assert float(number) * FACTORS[prefix] == pytest.approx(exact, rel=0.006)
        assert f"{100 * exact / peak:.0f}/{100 * exact / other:.0f}% measured/spec" in text
    ((intensity, limit),) = re.findall(r"([0-9.]+) FLOP/B +([a-z-]+)", text)
    assert float(intensity) == pytest.approx(flops / moved, rel=0.006)
    assert limit == ("memory-bound" if flops / moved < 55 / 9 else "compute-bound")
    ((ms, rate),) = re.findall(r"([0-9.]+) ms/step .* ([0-9.]+k?) tok/s", text)
    assert float(ms) == pytest.approx(time_s * 1e3 / len(steps), abs=0.051)
    tokens = sum((step.prefill_tokens or 0) + (step.decode_tokens or 0) for step in steps)
    per_s = float(rate.rstrip("k")) * (1000 if rate.endswith("k") else 1)
    assert per_s == pytest.approx(tokens / time_s, rel=0.006)
    ((per_step, prefix),) = re.findall(r"([0-9.]+) ([TGMk]?)B/step", text)
    assert float(per_step) * FACTORS[prefix] == pytest.approx(moved / len(steps), rel=0.006)
    parts = [float(part) for part in re.findall(r"([0-9.]+)%\s+│", text)][-3:]
    assert sum(parts) == pytest.approx(100.0, abs=0.11)


def test_the_narrow_table_has_the_numbers_of_the_panels() -> None:
    roof = roof_of(view())
    rows = [text_of(line) for line in kind_table(roof, 80)[1:]]
    for kind, row in zip(("prefill", "decode", "mixed"), rows, strict=True):
        panel = " ".join(text_of(line) for line in kind_panel(roof, kind, 40, 10))
        numbers = re.findall(r"[0-9.]+ [TGMk]?", row)
        assert f"{numbers[0]}FLOP/s" in panel
        assert row.split()[-1] in panel


@pytest.mark.parametrize("counters", [PEAKS, CountersView()], ids=["calibrated", "unknown"])
@pytest.mark.parametrize("size", [(80, 36), (60, 9), (120, 12), (40, 20), (160, 50)])
def test_blocks_fill_their_size(counters: CountersView, size: tuple[int, int]) -> None:
    width, height = size
    for of in (calibrated(counters).engines[0], engine_view()):
        roof = roof_of(of)
        blocks = [
            roofline_chart(roof, width, height, window_ns=of.window_ns),
            kind_panel(roof, "decode", width, height),
            moves_panel(roof, width, height),
        ]
        for lines in blocks:
            assert [width_of(line) for line in lines] == [width] * height


def test_without_a_peak_nothing_is_compared_and_the_remedy_is_named() -> None:
    bare = recorded()[0].engines[0]
    roof = roof_of(bare)
    assert moves(roof) == []
    assert "inferscope calibrate" in provenance(bare, roof)
    panel = " ".join(text_of(line) for line in kind_panel(roof, "decode", 40, 10))
    assert "- of peak" in panel
    assert "bound" not in panel
    assert "inferscope calibrate" in " ".join(
        text_of(line).strip("│ ") for line in moves_panel(roof, 40, 8)
    )


def test_what_would_move_it_is_computed_from_the_ceilings() -> None:
    found = dict(moves(roof_of(view())))
    assert found["ridge"] == "6.11 FLOP/byte"
    decode = [step for step in view().steps if step.kind == "decode" and not step.is_cold]
    weights = view().weight_bytes or 0
    rest = sum((s.read_bytes or 0) + (s.write_bytes or 0) for s in decode) / len(decode) - weights
    twice = 2 * (weights + rest) / (weights + 2 * rest)
    assert found["batch ×2"] == f"{twice:.2f}× decode tok/s"
    (tokens,) = re.findall(r"(\d+) tok", found["prefill ridge at"])
    assert 0 < int(tokens) < 40, "its mean step is right of the ridge"


def test_c_clears_the_trail_and_z_shows_the_chart_alone() -> None:
    async def scenario() -> None:
        async with screen(calibrated()) as running:
            await running.press("4")
            before = running.text.count("·")
            await running.press("c")
            assert running.text.count("·") < before
            await running.press("z")
            assert "Decode ●" not in running.text
            assert running.text.count("╭") == 1
            await running.press("escape")
            assert "Decode ●" in running.text

    play(scenario)


def test_a_first_scene_after_the_screen_opened_fills_every_block() -> None:
    async def scenario() -> None:
        async with screen(is_empty=True, size=NARROW) as running:
            await running.press("4")
            await running.show(calibrated())
            assert "What would move it" in running.text
            assert "◆ prefill" in running.text

    play(scenario)
