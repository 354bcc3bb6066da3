"""Timeline screen on a recording, and its numbers against the export of the same recording."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from inferscope.fold import FOR_SCREEN, EngineView, StepView
from inferscope.readers import open_replay
from inferscope.text.lines import text_of, width_of
from inferscope.text.panels.lanes import SPANS_NS, Sight, in_sight, lanes, newest_ns
from inferscope.text.panels.steps import decomposition, order_steps, step_named, step_table
from inferscope.tui.screens import DetailScreen
from inferscope.tui.screens.timeline import TimelineScreen
from inferscope.tui.snapshot_history import SnapshotHistory
from tests.recorded import DEMO, recorded
from tests.tui.live_screen import Screen, assert_golden, play, screen
from tests.tui.scenes import moving_snapshot

WIDE, NARROW = (120, 40), (80, 24)


def view() -> EngineView:
    return recorded()[0].engines[0]


def exported() -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in recorded()[1] if row["kind"] == "step"}


def is_printed(text: str, value: float) -> bool:
    """Return whether a text is a number rounded to the digits that it has."""
    digits = len(text.partition(".")[2])
    return abs(float(text) - value) <= 0.5001 * 10**-digits


def timeline(running: Screen) -> TimelineScreen:
    found = running.app.screen
    assert isinstance(found, TimelineScreen)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "size", "keys", "is_ascii"),
    [
        ("timeline_120x40", WIDE, "", False),
        ("timeline_80x24", NARROW, "", False),
        ("timeline_ascii_120x40", WIDE, "left left", True),
        ("timeline_slowest_120x40", WIDE, "s s s", False),
        ("timeline_zoomed_120x40", WIDE, "minus minus z", False),
        ("timeline_step_120x40", WIDE, "plus plus j j j enter", False),
        ("timeline_step_80x24", NARROW, "s enter", False),
    ],
)
def test_the_timeline_looks_like_its_golden(
    name: str, size: tuple[int, int], keys: str, is_ascii: bool
) -> None:
    async def scenario() -> None:
        async with screen(recorded()[0], size=size, ascii=is_ascii) as running:
            await running.press("3", *keys.split())
            assert [len(line) for line in running.lines] == [size[0]] * size[1]
            if is_ascii:
                assert running.text.isascii()
                assert "?" not in running.text.replace("? help", "")
            assert_golden(name, running.text)

    play(scenario)


@pytest.mark.thorough
def test_light_and_no_color_change_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with screen(recorded()[0]) as running:
            await running.press("3")
            dark, drawing = running.text, running.app.export_screenshot()
            assert "#e8a33d" in drawing
            await running.press("t")
            assert running.text == dark
            assert "#e8a33d" not in running.app.export_screenshot()
            monkeypatch.setenv("NO_COLOR", "1")
        async with screen(recorded()[0]) as running:
            await running.press("3")
            assert running.text == dark
            assert "#e8a33d" not in running.app.export_screenshot()

    play(scenario)


@pytest.mark.parametrize("sort", ["time", "device ms", "gap ms", "slowness"])
def test_each_number_of_the_table_is_that_of_the_exported_step(sort: str) -> None:
    shown = order_steps(view().steps, sort, 60)
    lines = step_table(view(), 160, 63, shown=shown, selected=None, sort=sort, names={})
    heads = text_of(lines[1])[1:]
    assert heads.split()[:9] == [
        "STEP", "KIND", "SEQS", "PREFILL", "DECODE", "DEVICE", "ms", "GAP", "ms",
    ]  # fmt: skip
    gaps_ns = {step.step: step.host_gap_ns for step in view().steps}
    for line, step in zip(lines[2:], shown, strict=False):
        number, _, kind, num, prefill, decode, ms, gap, flops, moved, added, share, *_ = text_of(
            line
        )[2:].split()
        row = exported()[int(number)]
        shares = row["shares"]
        of_phase: dict[str, int] = defaultdict(int)
        for each in shares:
            of_phase[each["phase"]] += each["tokens"]
        assert {"mixed": 2}.get(kind, 1) == len(of_phase)
        assert int(num) == len({each["request"] for each in shares})
        assert (int(prefill), int(decode)) == (of_phase["prefill"], of_phase["decode"])
        assert is_printed(ms, row["measured_ns"] / 1e6)
        assert is_printed(gap, gaps_ns[int(number)] / 1e6)
        assert share == f"{100 * (1 - row['unattributed_ns'] / row['measured_ns']):.1f}%"
        assert is_printed(flops, step.flops / row["measured_ns"])
        assert is_printed(moved, (step.read_bytes + step.write_bytes) / row["measured_ns"])
        assert added == "-" if step.blocks_added is None else int(added) == step.blocks_added


def test_the_slowest_and_the_longest_gaps_come_first() -> None:
    slowest = order_steps(view().steps, "device ms", 5)
    assert [step.measured_ns for step in slowest] == sorted(
        (row["measured_ns"] for row in exported().values()), reverse=True
    )[:5]
    gaps = [step.host_gap_ns for step in order_steps(view().steps, "gap ms", 5)]
    assert gaps == sorted((step.host_gap_ns for step in view().steps), reverse=True)[:5]
    assert order_steps(view().steps, "time", 2) == list(reversed(view().steps[-2:]))


def test_the_sum_of_a_step_is_its_measured_time_exactly() -> None:
    for step in view().steps[::7]:
        for width in (40, 80, 118):
            text = decomposition(step, {}, width)
            assert len(text) <= max(width, 60)
            whole, _, parts = text.partition(": ")[2].partition(" ms = ")
            numbers = [part.split()[-1] for part in parts.split(" + ")]
            digits = len(whole.partition(".")[2])
            assert round(sum(map(float, numbers)), digits) == float(whole)
            row = exported()[step.step]
            assert float(whole) == pytest.approx(row["measured_ns"] / 1e6, abs=0.51 * 10**-digits)


@pytest.mark.parametrize("span_ns", SPANS_NS)
@pytest.mark.parametrize("size", [(120, 22), (80, 12), (60, 9), (200, 60)])
def test_lanes_fill_their_size_and_their_shares_close(span_ns: int, size: tuple[int, int]) -> None:
    width, height = size
    until_ns = newest_ns(view()) - 3 * span_ns // 2
    sight = Sight(until_ns - span_ns, until_ns)
    lines = lanes(view(), width, height, sight=sight)
    assert [width_of(line) for line in lines] == [width] * height
    text = "\n".join(text_of(line) for line in lines)
    shares = [
        float(found)
        for name in ("prefill", "decode", "other", "host gap", "no work")
        for found in re.findall(rf"{name} .* ([0-9.]+)%", text)
    ]
    assert len(shares) == 5
    assert sum(shares) == pytest.approx(100.0)


def test_the_shares_of_the_phases_are_those_of_the_exported_steps_in_sight() -> None:
    span_ns = 2_000_000_000
    until_ns = newest_ns(view()) - 5_000_000_000
    sight = Sight(until_ns - span_ns, until_ns)
    spent: dict[str, float] = defaultdict(float)
    for row in exported().values():
        inside_ns = min(row["end_ns"], until_ns) - max(row["start_ns"], sight.since_ns)
        if inside_ns > 0:
            for share in row["shares"]:
                part = inside_ns / (row["end_ns"] - row["start_ns"])
                spent[share["phase"]] += share["ns"] * part
    text = "\n".join(text_of(line) for line in lanes(view(), 120, 22, sight=sight))
    for phase in ("prefill", "decode"):
        (found,) = re.findall(rf"{phase} .* ([0-9.]+)%", text)
        assert float(found) == pytest.approx(100 * spent[phase] / span_ns, abs=0.11)
    steps = in_sight(view().steps, sight)
    assert f"{len(steps)} steps" in text
    assert len(steps) == sum(
        row["end_ns"] > sight.since_ns and row["start_ns"] < until_ns for row in exported().values()
    )


def test_a_pan_freezes_and_zoom_stays_around_the_selected_step() -> None:
    async def scenario() -> None:
        async with screen(recorded()[0]) as running:
            await running.press("3", "left")
            assert running.app.scene.is_frozen
            before = timeline(running)._sight
            await running.press("left")
            assert timeline(running)._sight.until_ns < before.until_ns
            await running.press("s", "plus", "plus", "plus")
            chosen, sight = timeline(running).selected, timeline(running)._sight
            assert chosen is not None
            assert sight.span_ns == SPANS_NS[2]
            assert sight.since_ns <= chosen.start_ns <= chosen.end_ns <= sight.until_ns
            await running.press("end")
            assert timeline(running)._sight.until_ns == newest_ns(view())
            assert timeline(running).selected == view().steps[-1]

    play(scenario)


def test_enter_lists_the_requests_of_a_step_and_then_opens_one() -> None:
    async def scenario() -> None:
        async with screen(recorded()[0]) as running:
            await running.press("3", "s", "enter")
            step = timeline(running).selected
            assert step is not None
            assert f"Step {step.step}: {step.num_requests} requests" in running.text
            row = exported()[step.step]
            largest = sorted(row["shares"], key=lambda each: -each["ns"])
            await running.press("j", "enter")
            detail = running.app.screen
            assert isinstance(detail, DetailScreen)
            assert detail.row.request_id == largest[1]["request"]
            await running.press("escape")
            assert f"Step {step.step}: {step.num_requests} requests" in running.text
            await running.press("escape")
            assert "Steps: the last 2629" in running.text
            await running.press("escape")
            assert not isinstance(running.app.screen, TimelineScreen)

    play(scenario)


@pytest.mark.thorough
def test_enter_on_a_gap_of_the_detail_selects_its_step_and_escape_returns() -> None:
    source = open_replay(DEMO, keep=FOR_SCREEN)
    source.focus = "fe-52"
    source.has_steps = True
    focused = source.snapshot(60_000_000_000)
    source.close()
    row = next(row for row in focused.engines[0].requests if row.request_id == "fe-52")
    times_ns = {end_ns: gap_ns for gap_ns, end_ns in zip(row.gaps_ns, row.gap_ends_ns, strict=True)}
    longest_ns = max(times_ns, key=lambda end_ns: times_ns[end_ns])
    of_request = [step for step in view().steps if "fe-52" in step.request_ids]
    wanted = [step for step in of_request if step.end_ns <= longest_ns][-1]
    assert wanted.measured_ns > 3 * of_request[0].measured_ns / 2

    async def scenario() -> None:
        async with screen(focused) as running:
            await running.press("slash", *"0033", "enter", "enter")
            detail = running.app.screen
            assert isinstance(detail, DetailScreen)
            assert f"gap 1 of {len(row.gaps_ns)} by length: " in running.text
            await running.press("full_stop")
            assert f"gap 2 of {len(row.gaps_ns)} by length: " in running.text
            await running.press("comma", "enter")
            assert timeline(running).selected == wanted
            assert f"step {wanted.step}: " in running.text
            await running.press("escape")
            assert running.app.screen is detail

    play(scenario)


def test_g_goes_to_a_step_by_its_number_and_to_the_newest_of_a_request() -> None:
    steps = view().steps
    of_request = [step for step in steps if "fe-52" in step.request_ids]
    (name,) = (row.external_id for row in view().requests if row.request_id == "fe-52")
    wanted = {str(steps[700].step): steps[700], "fe-52": of_request[-1], name: of_request[-1]}

    async def scenario() -> None:
        async with screen(recorded()[0]) as running:
            await running.press("3")
            for text, step in wanted.items():
                await running.press(
                    "g", *("minus" if each == "-" else each for each in text), "enter"
                )
                assert timeline(running).selected == step
                assert running.app.scene.is_frozen
                assert f" step {step.step}: " in running.text
                sight = timeline(running)._sight
                assert sight.since_ns <= step.start_ns < step.end_ns <= sight.until_ns
            await running.press("home")
            assert timeline(running).selected == steps[-1]
            await running.press("g", "escape")
            assert isinstance(running.app.screen, TimelineScreen)

    play(scenario)


def test_g_states_which_steps_are_here_and_lets_the_text_be_mended() -> None:
    steps = view().steps
    kept = f"{steps[0].step} to {steps[-1].step} are kept"

    async def scenario() -> None:
        async with screen(recorded()[0], size=NARROW) as running:
            await running.press("3", "g", *"99999", "enter")
            assert f" no step 99999 here: {kept}" in running.text
            assert "Enter go to it" in running.lines[-1]
            assert timeline(running).selected == steps[-1]
            await running.press(*["backspace"] * 5, *str(steps[-9].step), "enter")
            assert timeline(running).selected == steps[-9]
            assert "Enter go to it" not in running.text
        async with screen(is_empty=True) as running:
            await running.press("3", "g", "1", "enter")
            assert "no recent step is kept here" in running.text

    play(scenario)


def test_the_selected_replica_has_the_step_of_a_number_and_a_rank_names_another() -> None:
    from msgspec.structs import replace

    steps = view().steps[-50:]
    both = dataclasses.replace(
        view(), steps=tuple(replace(s, dp_rank=rank) for s in steps for rank in (0, 1))
    )
    number = str(steps[3].step)
    for text, rank, found in ((number, 0, 0), (number, 1, 1), (f"1.{number}", 0, 1)):
        step = step_named(both, text, {}, rank=rank)
        assert step is not None
        assert (step.dp_rank, step.step) == (found, steps[3].step)
    assert step_named(both, f"2.{number}", {}) is None


def test_a_request_that_has_left_the_window_is_named() -> None:
    async def scenario() -> None:
        snapshot = recorded()[0]
        (only,) = snapshot.engines
        bare = dataclasses.replace(snapshot, engines=(dataclasses.replace(only, requests=()),))
        async with screen(bare) as running:
            await running.press("3", "enter", "enter")
            assert "is not among the requests of this window" in running.text

    play(scenario)


def test_a_click_selects_a_step_and_a_second_one_lists_its_requests() -> None:
    async def scenario() -> None:
        async with screen(recorded()[0]) as running:
            await running.press("3")
            await running.pilot.click("#steps", offset=(20, 5))
            assert timeline(running).selected == view().steps[-4]
            await running.pilot.click("#steps", offset=(20, 5), times=2)
            await running.pilot.pause()
            assert f"Step {view().steps[-4].step}:" in running.text

    play(scenario)


@pytest.mark.thorough
def test_every_key_is_harmless_without_steps() -> None:
    keys = ["left", "plus", "minus", "j", "pagedown", "home", "s", "z", "z", "enter"]
    keys += ["g", "7", "enter", "escape"]

    async def scenario() -> None:
        async with screen(is_empty=True) as running:
            await running.press("3", *keys)
            await running.show(moving_snapshot())
            await running.press(*keys)
            assert "no recent step is kept" in running.text

    play(scenario)


def test_the_source_is_asked_for_steps_only_while_they_are_on_screen() -> None:
    async def scenario() -> None:
        async with screen() as running:
            feed = running.app._feed
            assert not feed._has_steps
            await running.press("3")
            assert feed._has_steps
            await running.press("1")
            assert not feed._has_steps

    play(scenario)


def test_the_steps_of_kept_snapshots_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferscope.tui.snapshot_history.KEPT_ROWS", 40)
    past, steps = SnapshotHistory(), view().steps
    for at in range(100, len(steps), 10):
        only = dataclasses.replace(view(), steps=steps[at - 100 : at], requests=())
        now_ns = steps[at - 1].end_ns
        past.add(dataclasses.replace(recorded()[0], mono_ns=now_ns, engines=(only,)))
    assert 2 <= len(past) < 60
    held = {id(step): step for each in past for step in each.engines[0].steps}
    assert sum(len(step.request_ids) for step in held.values()) < 12 * 40 + 600


def two_ranks(steps: Sequence[StepView]) -> tuple[StepView, ...]:
    """Return the steps as if a second rank had executed them, half a millisecond later."""
    from msgspec.structs import replace

    return tuple(
        replace(
            step,
            ranks=(
                *step.ranks,
                replace(
                    step.ranks[0], rank=1, end_ns=step.ranks[0].end_ns + 500_000,
                    measured_ns=step.ranks[0].measured_ns + 500_000,
                    unattributed_ns=step.ranks[0].unattributed_ns + 500_000,
                ),
            ),
            shares_ns=step.shares_ns * 2,
        )
        for step in steps
    )  # fmt: skip


def test_ranks_of_a_team_have_lanes_and_the_slowest_is_marked() -> None:
    team = dataclasses.replace(view(), steps=two_ranks(view().steps[-200:]))
    until_ns = newest_ns(team)
    lines = lanes(team, 120, 24, sight=Sight(until_ns - 500_000_000, until_ns))
    of_ranks = [line for line in lines if text_of(line)[2:].startswith("  rank")]
    assert [text_of(line).split()[2] for line in of_ranks] == ["0", "1"]
    assert text_of(of_ranks[1]).split()[-3:-1] == ["+500", "µs"]
    assert any(role == "alarm" for _, role in of_ranks[1])
    assert not any(role == "alarm" for _, role in of_ranks[0])
    table = step_table(team, 120, 10, shown=team.steps[-5:], selected=None, sort="time", names={})
    assert "SKEW ms" in text_of(table[1])
    assert " 0.50 " in text_of(table[2])
    assert "on rank 0" in decomposition(team.steps[-1], {}, 118)
