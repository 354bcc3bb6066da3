"""Times as users write them."""

from __future__ import annotations

import argparse
from datetime import datetime

import pytest

from inferscope.cli.time_args import accept_negative_times, at_time, since_time
from inferscope.ring.extent import Extent

SECOND = 1_000_000_000
NOON = round(datetime(2026, 3, 4, 12, 0, 0).timestamp()) * SECOND
HELD = Extent(NOON - 3600 * SECOND, NOON)


@pytest.mark.parametrize(
    ("text", "before_s"),
    [("5m", 300), ("-5m", 300), ("90", 90), ("-1h30m", 5400), ("1.5s", 1.5), ("250ms", 0.25)],
)
def test_a_bare_duration_is_ago(text: str, before_s: float) -> None:
    assert since_time(text).real_ns(HELD) == NOON - round(before_s * SECOND)


@pytest.mark.parametrize(("text", "after_s"), [("15", 15), ("+1m30s", 90), ("-1m", 3540)])
def test_a_moment_is_counted_from_the_start_unless_it_is_negative(text: str, after_s: int) -> None:
    assert at_time(text).real_ns(HELD) == HELD.first_real_ns + after_s * SECOND


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("11:59", datetime(2026, 3, 4, 11, 59)),
        ("11:59:30.5", datetime(2026, 3, 4, 11, 59, 30, 500_000)),
        ("23:10", datetime(2026, 3, 3, 23, 10)),
        ("2026-03-01T08:00", datetime(2026, 3, 1, 8)),
    ],
)
def test_a_clock_time_is_the_last_such_time(text: str, expected: datetime) -> None:
    for read in (since_time, at_time):
        assert read(text).real_ns(HELD) == round(expected.timestamp() * SECOND)


@pytest.mark.parametrize("text", ["", "-", "x", "5 m", "25:00", "12:61", "-14:02", "9" * 40])
def test_what_is_no_time_is_named(text: str) -> None:
    for read in (since_time, at_time):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a time"):
            read(text)


def test_a_negative_duration_is_a_value_and_no_option() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    accept_negative_times(parser)
    parser.add_argument("--since", type=since_time)
    parser.add_argument("--once", action="store_true")
    parsed = parser.parse_args(["--since", "-5m", "--once"])
    assert parsed.since.before_end_ns == 300 * SECOND
    assert parsed.once
