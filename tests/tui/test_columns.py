from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.text.columns import column_at, columns_for, heading_line, order_rows, row_line
from inferscope.text.lines import text_of, width_of
from tests.tui.scenes import requests

ROWS = requests()
BY_NAME = {column.name: column for column in columns_for(200)}


@pytest.mark.parametrize("width", [40, 60, 78, 100, 116, 118, 136, 200])
def test_headings_and_rows_have_exactly_the_width(width: int) -> None:
    columns = columns_for(width)
    heading = heading_line(columns, width, unit="ms", sort="p99", is_reversed=True)
    assert width_of(heading) == width
    for row in ROWS:
        assert width_of(row_line(row, columns, width, unit="%")) == width


def test_unknown_is_a_dash_and_never_zero() -> None:
    waiting = next(row for row in ROWS if row.state == "waiting")
    cells = text_of(row_line(waiting, columns_for(116), 116, unit="ms")).split()
    assert cells == ["chat-7f60", "○", "waiting", "1330", "-", "0", "-", "-", "-", "-", "-", "-"]


@given(
    st.lists(st.none() | st.floats(0, 1e9), max_size=60),
    st.booleans(),
    st.integers(0, 70),
)
def test_the_heap_finds_what_the_full_sort_finds(
    values: list[float | None], is_reversed: bool, num_first: int
) -> None:
    rows = [replace(ROWS[0], tbt_p99_ns=value) for value in values]
    order = range(len(rows))
    full = order_rows(rows, order, BY_NAME["p99"], is_reversed=is_reversed)
    first = order_rows(rows, order, BY_NAME["p99"], is_reversed=is_reversed, num_first=num_first)
    assert first == full[:num_first]
    known = [rows[i].tbt_p99_ns is not None for i in full]
    assert known == sorted(known, reverse=True), "unknown comes last in either direction"


def test_a_click_finds_its_column() -> None:
    columns = columns_for(116)
    assert column_at(columns, 116, 0) is columns[0]
    assert column_at(columns, 116, 115) is columns[-1]
    assert column_at(columns, 116, 116) is None
