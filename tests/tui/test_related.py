"""From one request to another: the ones it waited for, and one to compare it with."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from inferscope.attribution import BlameShare
from inferscope.fold.snapshots import RequestRow, Snapshot
from inferscope.text.lines import text_of, width_of
from inferscope.text.panels import blamed, pair
from inferscope.tui.screens import DetailScreen, OverviewScreen, PairScreen
from tests.tui.live_screen import Screen, play, screen
from tests.tui.recorded import recorded
from tests.tui.scenes import MS, moving_snapshot, requests, with_requests

ROWS = requests()
BLAME = (
    BlameShare("queue", "req-agent-c2", 12 * MS),
    BlameShare("queue", "req-rag-0188", 7 * MS),
    BlameShare("decode_co_batched", "req-rag-0188", 40 * MS),
    BlameShare("queue", "req-long-gone", 3 * MS),
    BlameShare("queue", None, 90 * MS),
)


def waiting() -> Snapshot:
    """The hand-built engine, whose first request waited for others."""
    return with_requests(moving_snapshot(), (replace(ROWS[0], blame=BLAME), *ROWS[1:]))


def shown(running: Screen) -> str:
    detail = running.app.screen
    assert isinstance(detail, DetailScreen)
    return detail.row.external_id or ""


def test_waits_are_summed_by_request_and_unknown_ones_come_last() -> None:
    found = blamed(replace(ROWS[0], blame=BLAME))
    assert [(each.request_id, each.ns // MS) for each in found] == [
        ("req-rag-0188", 47), ("req-agent-c2", 12), ("req-long-gone", 3), (None, 90),
    ]  # fmt: skip
    assert found[0].cause == "decode_co_batched"
    assert sum(each.ns for each in found) == sum(share.ns for share in BLAME)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [(120, 40), (80, 24)])
def test_b_opens_the_request_that_was_waited_for_and_escape_returns(size: tuple[int, int]) -> None:
    async def scenario() -> None:
        async with screen(waiting(), size=size) as running:
            await running.press("slash", *"rag-018c", "enter", "enter")
            assert shown(running) == "rag-018c"
            assert "rag-0188" in running.text
            await running.press("b")
            assert shown(running) == "rag-0188"
            await running.press("escape")
            assert shown(running) == "rag-018c"
            await running.press("tab", "b")
            assert shown(running) == "agent-c2"
            await running.press("escape", "tab", "tab", "b")
            assert shown(running) == "rag-018c"
            assert "req-long-gone has left the list: inferscope why req-long-gone" in running.text
            await running.press("escape")
            assert isinstance(running.app.screen, OverviewScreen)

    play(scenario)


@pytest.mark.thorough
def test_blame_stays_on_screen_while_the_request_is_out_of_focus() -> None:
    async def scenario() -> None:
        async with screen(waiting()) as running:
            await running.press("slash", *"rag-018c", "enter", "enter")
            await running.show(moving_snapshot(1))
            assert "Waited for" in running.text
            await running.press("escape", "escape", "G", "enter", "b")
            assert "waited for no request that is known by name" in running.text

    play(scenario)


def test_two_marked_requests_are_compared_as_they_grow() -> None:
    async def scenario() -> None:
        async with screen() as running:
            await running.press("x")
            assert "x on another request compares them" in running.text
            await running.press("x")
            assert "is not marked now" in running.text
            await running.press("x", "down", "x")
            assert isinstance(running.app.screen, PairScreen)
            before = running.text
            await running.show(moving_snapshot(8))
            assert running.text != before
            await running.press("escape")
            assert isinstance(running.app.screen, OverviewScreen)

    play(scenario)


def numbers(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"[+-]?\d+\.\d|(?<= )0(?= )", line)[:3]]


@pytest.mark.thorough
@pytest.mark.parametrize("size", [(80, 20), (80, 40), (120, 36), (200, 50)])
def test_printed_rows_of_a_pair_add_up_to_the_printed_sums(size: tuple[int, int]) -> None:
    one, other = (row for row in recorded().view.requests[:2])
    lines = pair(one, other, *size)
    assert [width_of(line) for line in lines] == [size[0]] * size[1]
    texts = [text_of(line) for line in lines]
    first = next(at for at, text in enumerate(texts) if text.strip("│ ") == "")
    last = next(at for at, text in enumerate(texts) if "── sum" in text)
    rows = [numbers(text) for text in texts[first + 1 : last]]
    assert [round(sum(column) * 10) for column in zip(*rows, strict=True)] == [
        round(number * 10) for number in numbers(texts[last])
    ]
    for row, request in zip(numbers(texts[last])[:2], (one, other), strict=True):
        assert row == pytest.approx(sum(request.ledger_ns.values()) / 1e6, abs=0.05)


def test_a_pair_of_the_recording_has_the_numbers_of_the_export() -> None:
    lines = {row["request"]: row for row in recorded().exported("request")}
    one, other = recorded().view.requests[:2]
    text = "\n".join(text_of(line) for line in pair(one, other, 120, 40))

    def of(row: RequestRow) -> float:
        line = lines[row.request_id]
        return (line["first_token_ns"] - line["arrived_ns"]) / 1e6

    assert re.search(rf"TTFT +{of(one):.1f} ms +{of(other):.1f} ms", text)
