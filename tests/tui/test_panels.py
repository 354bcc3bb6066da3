from __future__ import annotations

import time
from dataclasses import replace

import pytest

from inferscope.cost.verdict import split_verdict
from inferscope.fold.snapshots import (
    NO_QUANTILES,
    CostModel,
    EngineView,
    ExpertsView,
    Health,
    RunFinding,
    Series,
)
from inferscope.records import CAUSES, DEVICE_SECONDS
from inferscope.text import panels
from inferscope.text.header_line import caveats, format_probe, header
from inferscope.text.labels import CAUSE_MEANINGS
from inferscope.text.lines import text_of, width_of
from inferscope.text.once import once_text
from inferscope.text.panels.causes import cause_rows
from inferscope.text.panels.ledger import equation, in_lifecycle_order, waterfall
from inferscope.text.panels.phases import phase_rows
from inferscope.text.panels.request import request_detail
from inferscope.text.scene import Scene
from tests.tui.scenes import MS, engine_view, moving_snapshot, requests, with_view

ALL = [
    panels.device_time,
    panels.service_levels,
    panels.causes,
    panels.tokens_per_second,
    panels.engine_and_kv,
]


def empty_view() -> EngineView:
    """An engine of which nothing is known yet."""
    return replace(
        engine_view(),
        device="", model="", version="", pids=(), window_ns=0, device_ns={},
        ttft=NO_QUANTILES, tbt=NO_QUANTILES, e2e=NO_QUANTILES, queue=NO_QUANTILES,
        step=NO_QUANTILES, host_gap=NO_QUANTILES, ledger_ns={}, prefill_tok_s=None,
        decode_tok_s=None, finished_s=None, blocks_used=0, blocks_cached=0, blocks_total=0,
        block_tokens=0, max_running=0, cached_share=None, mixed_share=None, model_residual=None,
        model_source="", series=Series((), (), (), (), (), (), (), (), ()), requests=(),
        num_requests=0, num_running=0, num_waiting=0, num_held=0, num_preemptions=0,
        health=Health("on", None, 0, 0, 0, 0, 0, ""),
    )  # fmt: skip


@pytest.mark.parametrize("view", [engine_view(), empty_view()], ids=["busy", "empty"])
@pytest.mark.parametrize("width", [30, 36, 44, 58, 60, 90, 160])
@pytest.mark.parametrize("height", [5, 9, 14])
def test_panels_fill_exactly_their_size(view: EngineView, width: int, height: int) -> None:
    for panel in ALL:
        lines = panel(view, width, height)
        assert [width_of(line) for line in lines] == [width] * height, panel.__name__
        assert all(text_of(line).isprintable() for line in lines)
    for line in panels.brief(view, max(width, 60), 7):
        assert width_of(line) == max(width, 60)


def test_engine_panel_shows_the_load_of_a_mixture() -> None:
    experts = ExpertsView(8, 100.0, 310, 120.0, layer=1, expert=6, expert_share=0.81)
    view = replace(engine_view(), experts=experts)
    lines = [text_of(line) for line in panels.engine_and_kv(view, 74, 12)]
    assert any(
        "experts  busiest 3.1x mean, at random 1.2x; layer 1: expert 6 81.0%" in line
        for line in lines
    )
    assert not any(
        "expert" in text_of(line) for line in panels.engine_and_kv(engine_view(), 74, 12)
    )


def test_phases_sum_to_a_hundred_per_cent() -> None:
    assert sum(row.tenths for row in phase_rows(engine_view())) == 1000


def test_every_device_second_and_cause_has_a_place() -> None:
    view = replace(engine_view(), device_ns=dict.fromkeys(DEVICE_SECONDS, 7 * MS))
    assert sum(row.device_ns or 0 for row in phase_rows(view)) == 7 * len(DEVICE_SECONDS) * MS
    assert set(CAUSE_MEANINGS) == set(CAUSES)


def test_a_source_that_is_absent_is_unknown() -> None:
    view = replace(engine_view(), device_ns={"prefill": 3 * MS, "decode": 1 * MS})
    rows = {row.name: row.device_ns for row in phase_rows(view)}
    assert rows == {
        "prefill": 3 * MS, "decode": 1 * MS, "other": None, "host gap": None, "no work": None,
    }  # fmt: skip
    assert "host gap       -" in text_of(panels.device_time(view, 44, 9)[4])


def test_only_a_gpu_is_called_one() -> None:
    def title(device: str) -> str:
        return text_of(panels.device_time(replace(engine_view(), device=device), 44, 9)[0])

    assert "GPU time" in title("NVIDIA H200")
    assert "Device time" in title("cpu")
    assert "Device time" in title("")


def test_the_rest_of_the_causes_closes_the_sum() -> None:
    ledger_ns = engine_view().ledger_ns
    rows = cause_rows(ledger_ns, 5)
    assert len(rows) == 5
    assert sum(cause_ns for _, cause_ns, _ in rows) == sum(ledger_ns.values())
    assert sum(tenths for _, _, tenths in rows) == 1000


@pytest.mark.parametrize("row", requests(), ids=lambda row: row.external_id)
def test_printed_ledger_rows_add_up_to_the_printed_sum(row) -> None:  # type: ignore[no-untyped-def]
    lines = [
        text_of(line) for line in waterfall(row.ledger_ns, 116, 25, total="last token", note="")
    ]
    tenths = [round(float(line[22:31]) * 10) for line in lines[1:-1]]
    assert sum(tenths) == round(float(lines[-1][22:31]) * 10)
    shares = [round(float(line[31:39].strip(" %")) * 10) for line in lines[1:-1]]
    assert sum(shares) == 1000


def test_each_bar_starts_where_the_one_before_ended() -> None:
    lines = waterfall({"queue": 25 * MS, "decode_own": 75 * MS}, 62, 9, total="", note="")
    first, second = (text_of(line)[42:] for line in lines[1:3])
    assert first == "█████".ljust(20)
    assert second == "     " + "█" * 15


def test_the_ledger_is_in_the_order_of_life_and_merges_its_smallest_rows() -> None:
    ledger_ns = {"delivery": 1, "queue": 5, "decode_own": 9, "frontend": 2, "new_cause": 3}
    assert [cause for cause, _ in in_lifecycle_order(ledger_ns, 9)] == [
        "frontend", "queue", "decode_own", "delivery", "new_cause",
    ]  # fmt: skip
    assert in_lifecycle_order(ledger_ns, 3) == [
        ("queue", 5),
        ("decode_own", 9),
        ("smaller causes", 6),
    ]


def test_the_header_of_a_ledger_owns_up_to_a_residual() -> None:
    ledger_ns = {"queue": 3_295 * MS}
    assert equation(ledger_ns, 3_295 * MS, is_over=True) == "3295.0 ms = sum of rows"
    assert equation(ledger_ns, 3_296 * MS, is_over=True) == (
        "3296.0 ms = 3295.0 in rows + 1.0 residual"
    )
    assert "1.0 not booked yet" in equation(ledger_ns, 3_296 * MS, is_over=False)


@pytest.mark.parametrize("size", [(120, 36), (80, 20), (60, 12), (160, 50)])
def test_the_detail_fills_exactly_its_size(size: tuple[int, int]) -> None:
    width, height = size
    for row in requests():
        lines = request_detail(row, engine_view(), width, height)
        assert all(width_of(line) == width for line in lines)
        assert len(lines) <= height


SLOW = RunFinding("slow_steps", "medium", "Steps are slow: others use its CPUs", ("slowdown",))
RANK = RunFinding(
    "slow_rank", "medium", "Rank 1 is slow, and the others wait for it", ("rank_wait",)
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"is_alive": False}, "vLLM stopped reporting"),
        ({"num_held": 2}, "2 requests are preempted"),
        ({"num_waiting": 4, "binding": "blocks"}, "4 requests wait for KV blocks: 61.0%"),
        ({"num_waiting": 1, "binding": "slots"}, "1 request waits for a slot: 31 of 256"),
        ({"num_waiting": 1, "binding": "budget"}, "token budget of a step (2048 tokens)"),
        ({"num_waiting": 4, "binding": "none"}, ""),
        (
            {"ledger_ns": {"decode_interference": 30 * MS, "decode_own": 70 * MS}},
            "30.0% of latency is interference",
        ),
        ({"ledger_ns": {"queue": 50 * MS, "decode_own": 50 * MS}}, "50.0% of latency is queue"),
        ({"ledger_ns": {"cpu_gap": 50 * MS, "decode_own": 50 * MS}}, "is cpu_gap: scheduler"),
        ({"device_ns": {"decode": 70 * MS, "idle_host_gap": 30 * MS}}, "idle 30.0% of the time"),
        (
            {"model_residual": 0.5},
            "The last steps took 50% more than modelled (fit): model 1.5× off: split is rough.",
        ),
        (
            {"ledger_ns": {"slowdown": 50 * MS, "decode_own": 50 * MS}, "findings": (SLOW,)},
            "50.0% of latency is slowdown: Steps are slow: others use its CPUs.",
        ),
        (
            {"ledger_ns": {"rank_wait": 50 * MS, "decode_own": 50 * MS}, "findings": (RANK,)},
            "50.0% of latency is rank_wait: Rank 1 is slow, and the others wait for it.",
        ),
        ({"findings": (replace(SLOW, severity="low"), SLOW)}, "Over the whole run: Steps are slow"),
        ({"findings": (replace(SLOW, severity="low"),)}, ""),
    ],
)
def test_the_why_line_names_the_largest_problem_or_is_silent(
    changes: dict[str, object], message: str
) -> None:
    healthy = replace(
        engine_view(), num_held=0, num_waiting=0, ledger_ns={"decode_own": MS}, requests=()
    )
    sentence = panels.largest_problem(replace(healthy, **changes))  # type: ignore[arg-type]
    assert message in sentence
    assert bool(message) == bool(sentence)


@pytest.mark.parametrize("residual", [0.347, 4.0, -0.8])
def test_a_ledger_of_an_unreliable_split_is_marked_above_it(residual: float) -> None:
    view = replace(engine_view(), model_residual=residual)
    verdict = split_verdict(residual)
    assert "× off" in verdict
    _, first, *_ = map(text_of, panels.causes(view, 58, 9))
    assert f"▲ {verdict}" in first
    first, title, *_ = map(text_of, request_detail(view.requests[0], view, 80, 20))
    assert f"▲ {verdict}, over the engine's last 256 steps" in first
    assert "To the first token" in title
    text = once_text(with_view(moving_snapshot(), model_residual=residual)).splitlines()
    assert text[text.index(next(x for x in text if "Where latency went" in x)) + 1] == (
        f"  ▲ {verdict}"
    )
    sound = replace(view, model_residual=0.1)
    assert not any("× off" in text_of(line) for line in panels.causes(sound, 58, 9))


def test_an_engine_that_shut_down_is_not_called_lost() -> None:
    closed = Health("closed", 0.004, 9, 0, 0, 0, 0, "")
    ended = with_view(moving_snapshot(), health=closed, is_alive=False)
    assert caveats(Scene(snapshot=ended)) == []
    assert "stopped reporting" not in panels.largest_problem(ended.engines[0])


@pytest.mark.parametrize(("num_steps", "is_provisional"), [(23, True), (0, True), (80, False)])
def test_header_states_that_early_shares_are_provisional(
    num_steps: int, is_provisional: bool
) -> None:
    model = CostModel("eager", "roofline", "roofline+eager-16", 0.1, num_steps, is_provisional)
    scene = Scene(snapshot=with_view(moving_snapshot(), cost_models=(model,)))
    note = "shares provisional: 23 of 64 steps learned"
    assert caveats(scene) == ([note] if num_steps == 23 else [])
    assert (note in text_of(header(scene, 160))) is (num_steps == 23)


def test_the_header_owns_up() -> None:
    health = Health("lost", 0.004, 9, 12, 0, 3, 0, "")
    late = (replace(requests()[0], joined_late=True),)
    snapshot = with_view(
        moving_snapshot(), health=health, is_synthetic=True, requests=late, is_alive=False
    )
    scene = Scene(snapshot=snapshot)
    assert caveats(scene) == ["engine lost", "12 records lost", "3 unjoined", "1 joined late"]
    for width in (40, 60, 80, 100, 120, 200):
        assert width_of(header(scene, width)) == width
    assert "synthetic" in text_of(header(scene, 120))
    assert "▲ engine lost" in text_of(header(scene, 80))


def test_the_header_cuts_names_before_facts() -> None:
    snapshot = with_view(moving_snapshot(), model="a-very-long-model-name" * 9, device="cpu")
    text = text_of(header(Scene(snapshot=snapshot), 120))
    assert "● live" in text
    assert "probe 0.4%" in text
    assert "hidden" not in text
    assert len(text) == 120


def test_what_the_probe_does_behind_the_device_is_shown_apart() -> None:
    assert format_probe(Health("on", 0.004, 9, 0, 0, 0, 0, "")) == "0.4%"
    hidden = Health("on", 0.012, 9, 0, 0, 0, 0, "", probe_hidden_share=0.009)
    assert format_probe(hidden) == "0.3% + 0.9% hidden"
    assert format_probe(Health("on", None, 0, 0, 0, 0, 0, "")) == "-"


def test_what_has_ended_on_another_day_shows_the_date() -> None:
    long_ago = replace(moving_snapshot(), real_ns=1_700_000_000_000_000_000)
    ended = replace(long_ago, mode="ended")
    for width in (140, 80):
        line = text_of(header(Scene(snapshot=ended), width))
        assert "2023-11-1" in line
        assert len(line) == width
    assert "2023-11-1" in once_text(ended).splitlines()[0]
    assert "2023" not in text_of(header(Scene(snapshot=long_ago), 140))
    now = replace(ended, real_ns=time.time_ns())
    assert "-" not in text_of(header(Scene(snapshot=now), 140)).split("probe")[1]
