from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.text.labels import more_or_less
from inferscope.text.plots import (
    bar,
    closed,
    columns,
    count,
    duration,
    fit,
    fit_name,
    milliseconds,
    offset_bar,
    per_second,
    plain,
    resample,
    seconds,
    share,
    sparkline,
    split_bar,
    to_ascii,
)

shares = st.floats(-1, 2, allow_nan=False)
widths = st.integers(0, 130)
series = st.lists(st.none() | st.floats(-10, 1e12, allow_nan=False), max_size=320)


def is_clean(text: str) -> bool:
    return all(c.isprintable() for c in text)


@given(st.none() | shares, widths)
def test_bar_has_exactly_its_width(value: float | None, width: int) -> None:
    drawn = bar(value, width)
    assert len(drawn) == width
    assert is_clean(drawn)


@given(shares, shares, widths)
def test_offset_bar_has_exactly_its_width(start: float, end: float, width: int) -> None:
    assert len(offset_bar(start, end, width)) == width


@given(st.lists(st.floats(0, 1), max_size=9), widths)
def test_split_bar_fills_no_more_than_its_width(values: list[float], width: int) -> None:
    parts = split_bar(values, width)
    assert len(parts) == len(values)
    assert sum(len(part) for part in parts) == round(min(sum(values), 1.0) * width)


@given(series, widths, st.integers(1, 6))
def test_columns_have_exactly_their_size(
    values: list[float | None], width: int, height: int
) -> None:
    drawn = columns(values, width, height)
    assert [len(row) for row in drawn] == [width] * height
    assert all(is_clean(row) for row in drawn)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=320), st.integers(1, 130))
def test_resampling_keeps_the_area(values: list[float], width: int) -> None:
    cells = resample(values, width)
    mean = sum(values) / len(values)
    assert sum(cell or 0 for cell in cells) / width == pytest.approx(mean, abs=1e-3, rel=1e-6)


@given(st.text(), widths)
def test_fitted_plain_text_has_exactly_its_width_and_no_control_characters(
    text: str, width: int
) -> None:
    fitted = fit(plain(text), width)
    assert len(fitted) == width
    assert is_clean(fitted)
    assert len(to_ascii(fitted)) == width
    assert to_ascii(fitted).isascii()


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=12), st.integers(0, 10**7))
def test_closed_rows_sum_to_the_printed_total(values: list[float], total: int) -> None:
    rows = closed(values, total)
    assert all(row >= 0 for row in rows)
    assert sum(rows) == (total if sum(values) > 0 else 0)


@given(st.none() | st.floats(0, 1e15, allow_nan=False))
def test_numbers_are_short_and_clean(value: float | None) -> None:
    assert len(per_second(value)) <= 8
    assert len(count(value)) <= 8
    assert all(is_clean(write(value)) for write in (milliseconds, seconds, duration, share))


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (per_second(3370), "3.37k"),
        (per_second(0.314), "0.31"),
        (per_second(9.996), "10.0"),
        (per_second(99.96), "100"),
        (per_second(999.6), "1.00k"),
        (per_second(14_230), "14.2k"),
        (per_second(999_600), "1.00M"),
        (per_second(1_210_000), "1.21M"),
        (per_second(None), "-"),
        (count(99_999), "99999"),
        (count(512_000), "512k"),
        (count(None), "-"),
        (milliseconds(61_249_000), "61.2"),
        (milliseconds(12_345_678_900_000, width=8), "12345679"),
        (milliseconds(None), "-"),
        (milliseconds(0), "0.0"),
        (seconds(2_900_000_000), "2.90"),
        (seconds(15_000_000_000), "15.0"),
        (duration(850_000), "850 µs"),
        (duration(38_200_000), "38.2 ms"),
        (duration(2_900_000_000), "2.9 s"),
        (duration(192_000_000_000), "3m12s"),
        (duration(59_990_000_000), "1m00s"),
        (duration(7_500_000_000_000), "2h05m"),
        (share(0.0914), "9.1%"),
        (share(None), "-"),
    ],
)
def test_numbers_have_fixed_precision(written: str, wanted: str) -> None:
    assert written == wanted


def test_blocks_fill_by_eighths() -> None:
    assert bar(0.5, 5) == "██▌  "
    assert bar(0.0, 3) == "   "
    assert bar(1e-9, 3) == "▏  "
    assert offset_bar(0.5, 1.0, 4) == "  ██"
    assert sparkline([0, 1, 4, 8], 4) == " ▁▄█"
    assert columns([0, 8, 16], 3, 2) == ["  █", " ██"]
    assert split_bar([0.5, 0.25], 8) == ["████", "██"]


def test_unknown_columns_stay_empty() -> None:
    assert sparkline([None, 1.0, None, 1.0], 4) == " █ █"
    assert sparkline([], 3) == "   "


@pytest.mark.parametrize(
    ("difference", "text"), [(0.364, "36% more"), (-0.09, "9% less"), (0.004, "0.4% more")]
)
def test_a_small_difference_is_not_written_as_none(difference: float, text: str) -> None:
    assert more_or_less(difference) == text


def test_ascii_maps_blocks_by_weight() -> None:
    assert to_ascii("█▌▎▁ ╭─│") == "#=-. +-|"


def test_plain_replaces_what_is_not_one_cell() -> None:
    assert plain("a\x1b[31mb\n日e\u0301") == "a?[31mb??e?"


@given(st.text(max_size=60), st.integers(min_value=0, max_value=40))
def test_a_name_keeps_both_ends_and_its_width(name: str, width: int) -> None:
    fitted = fit_name(name, width)
    assert len(fitted) == width
    if len(name) > width >= 9:
        head, tail = fitted.split("…", 1) if "…" not in name else (fitted[:4], fitted[-4:])
        assert name.startswith(head)
        assert name.endswith(tail)
