from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from inferscope.text.once import once_text
from tests.recorded import recorded
from tests.tui.live_screen import assert_golden, play, screen
from tests.tui.scenes import moving_snapshot, with_requests, with_view


def test_the_text_looks_like_its_golden() -> None:
    assert_golden("once_100", once_text(moving_snapshot(), width=100))


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("number", range(7))
def test_no_line_is_wider_than_asked_for(number: int, width: int) -> None:
    for snapshot in (moving_snapshot(), recorded()[0]):
        text = once_text(snapshot, screen=number, width=width)
        assert max(len(line) for line in text.splitlines()) <= width


@pytest.mark.parametrize("number", range(7))
def test_ascii_text_is_ascii(number: int) -> None:
    assert once_text(recorded()[0], screen=number, ascii=True).isascii()


@pytest.mark.parametrize("number", [0, 3, 4, 5, 6])
def test_a_screen_as_text_has_the_panels_and_the_remark_of_the_screen(number: int) -> None:
    snapshot = recorded()[0]
    text = once_text(snapshot, screen=number, width=120)

    async def scenario() -> None:
        async with screen(snapshot, size=(120, 40)) as running:
            await running.press(str(number))
            drawn = running.text
            titles = re.findall("╭─ (.*?) [─╮]", drawn)
            assert titles == re.findall("╭─ (.*?) [─╮]", text)
            assert len(titles) >= 2
            remark = running.lines[-2].strip()
            assert remark.rstrip("… ") in " ".join(text.split())

    play(scenario)


def test_the_requests_as_text_are_all_of_them() -> None:
    snapshot = moving_snapshot()
    (view,) = snapshot.engines
    text = once_text(snapshot, screen=2, width=120)
    for row in view.requests:
        assert (row.external_id or row.request_id)[:12] in text
    assert " more\n" not in text


def test_each_engine_has_its_screen_and_the_fleet_is_one() -> None:
    (view,) = recorded()[0].engines
    two = replace(recorded()[0], engines=(view, replace(view, engine_id="other-1", model="m2")))
    assert once_text(two, screen=4).count("╭─ Roofline") == 2
    fleet = once_text(two, screen=0)
    assert fleet.count("╭─ Fleet") == 1
    assert {view.engine_id, "other-1"} <= set(fleet.split())


def test_nothing_to_show_is_reported() -> None:
    nothing = replace(moving_snapshot(), engines=(), notes=("a block is damaged",))
    assert "no records from an engine yet" in once_text(nothing)
    assert "note: a block is damaged" in once_text(nothing)
    idle = with_requests(moving_snapshot(), ())
    assert "Requests: 0 live, 0 of 607 done in 60 s\n" in once_text(idle)
    assert "Requests: none yet\n" in once_text(with_view(idle, num_finished=0))


def test_what_is_not_observed_is_reported_with_the_reason_and_no_cause_is_shown() -> None:
    snapshot = moving_snapshot()
    (view, *_) = snapshot.engines
    feature = "the scheduler: Scheduler.update_from_output is missing"
    missing = "core not observed"
    health = replace(view.health, probe_state="unsupported", unsupported=(feature,))
    rows = tuple(
        replace(
            row, ledger_ns={}, ttft_ledger_ns={}, interference_share=None, ledger_missing=missing
        )
        for row in view.requests
    )
    unobserved = with_view(
        snapshot, health=health, ledger_ns={}, ledger_missing=missing, requests=rows
    )
    text = once_text(unobserved, width=200)
    assert "▲ probe unsupported, core not observed, unsupported: the scheduler" in text
    assert f"Requests have no ledger: core not observed ({feature})." in text
    assert "- (core not observed: requests have no ledger)" in text
    for cause in ("frontend", "decode_own", "prefill_interference"):
        assert cause not in text


def test_the_text_needs_no_textual() -> None:
    code = "import sys, inferscope.text.once; print({'textual', 'rich'} & set(sys.modules))"
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert printed.stdout.strip() == "set()"
