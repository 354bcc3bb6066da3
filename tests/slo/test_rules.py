"""What the generated rules do, by promtool: pages, tickets, and above all silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferscope.slo.rules import FAST_INTERVAL_S, RuleOptions
from tests.slo.promtool import Run, counter, gauge, gone

pytestmark = [pytest.mark.thorough, pytest.mark.process]

FAST, SLOW, TRICKLE, INSTANCE, STALLED, NOT_ADMITTING, RANK_HUNG, BLIND, BEHIND, KV, PREEMPTIONS = (
    "InferScopeBudgetBurnsFast",
    "InferScopeBudgetBurnsSlowly",
    "InferScopeBudgetTrickles",
    "InferScopeInstanceBurns",
    "InferScopeStalled",
    "InferScopeNotAdmitting",
    "InferScopeRankHung",
    "InferScopeBlind",
    "InferScopeBehind",
    "InferScopeKvSaturated",
    "InferScopePreemptionStorm",
)
TTFT, AVAILABLE = "m/ttft", "m/availability"
BURNING = (f"{FAST}/{TTFT}", f"{INSTANCE}/{TTFT}", f"{SLOW}/{TTFT}")
PAGE = {"severity": "page", "model": "m", "slo": "ttft"}


def test_a_fast_burn_pages_until_it_is_over(tmp_path: Path) -> None:
    run = Run()
    run.healthy(180)
    run.requests(
        "ttft",
        good=counter((60, 2.0), (30, 1.0), (90, 2.0)),
        bad=counter((60, 0.0), (30, 1.0), (90, 0.0)),
    )
    run.requests("availability", good=counter((180, 2.0)), bad=counter((180, 0.0)))
    run.fires(59)
    run.fires(67, f"{SLOW}/{TTFT}")  # after some minutes too little has burned to page
    run.fires(85, *BURNING)
    run.ask(85, "count by (severity) (ALERTS{alertstate='firing'})",
            ({"severity": "page"}, 1), ({"severity": "ticket"}, 2))  # fmt: skip
    # The half hour of the second pair, the five minutes of each rate, and five to be sure.
    run.ask(132, f"ALERTS{{alertname='{FAST}', alertstate='firing'}}")
    run.holds(tmp_path)


def test_a_slow_burn_is_a_ticket(tmp_path: Path) -> None:
    run = Run()
    run.healthy(180)
    run.requests("ttft", good=counter((180, 1.92)), bad=counter((180, 0.08)))
    run.ask(179, "count_over_time(ALERTS{severity='page', alertstate='firing'}[3h])")
    run.fires(60, f"{SLOW}/{TTFT}")
    run.fires(179, f"{SLOW}/{TTFT}")
    run.holds(tmp_path)


def test_an_idle_engine_is_no_alert(tmp_path: Path) -> None:
    run = Run()
    run.up(gauge((120, 1)))
    run.add("inferscope_requests_running", gauge((120, 0)))
    run.steps(counter((30, 20), (90, 0)))
    run.requests("ttft", good=counter((30, 1.0), (90, 0)), bad=counter((30, 0), (90, 0)))
    run.never_fired(119)
    run.holds(tmp_path)


def test_nothing_at_all_is_no_alert(tmp_path: Path) -> None:
    run = Run()
    run.series["up{job='another'}"] = gauge((60, 0))
    run.never_fired(59)
    run.holds(tmp_path)


def test_a_series_first_seen_at_zero_pages_from_its_first_bad_requests(tmp_path: Path) -> None:
    run = Run()
    run.healthy(30)
    run.requests("ttft", good=gauge((30, 0)), bad=counter((0.5, 0), (29.5, 2.0)))
    run.fires(6, *BURNING)
    run.holds(tmp_path)


def test_a_series_first_seen_with_a_past_shows_nothing_of_now(tmp_path: Path) -> None:
    run = Run()
    run.healthy(90)
    run.requests("ttft", good=counter((90, 2.0), start=100), bad=gauge((90, 50_000)))
    run.never_fired(89)
    run.holds(tmp_path)


def test_a_cause_that_flaps_is_one_page(tmp_path: Path) -> None:
    run = Run()
    run.healthy(120)
    run.requests(
        "ttft", good=counter((120, 2.0)), bad=counter((10, 0.0), (110, 1.5)), cause="unused"
    )
    del run.series[next(name for name in run.series if "unused" in name)]
    causes = {
        "prefill_interference": ((10, 0.0), (20, 1.0), (90, 0.3)),
        "queue": ((10, 0.0), (20, 0.5), (90, 1.2)),
    }
    for cause, pieces in causes.items():
        run.add("inferscope_slo_breaches_total", counter(*pieces), slo="ttft", cause=cause)
    for minute, cause in ((25, "prefill_interference"), (110, "queue")):
        run.expect_alert(minute, FAST, PAGE, cause=cause)
    # It began once: the time at which it did is the same throughout, of one alert only.
    since = "ALERTS_FOR_STATE{alertname='InferScopeBudgetBurnsFast'}[119m]"
    run.ask(
        119,
        f"count(max_over_time({since}) == min_over_time({since}))",
        ({}, 1),
    )
    run.ask(
        119, "count(count_over_time(ALERTS{severity='page', alertstate='firing'}[119m]))", ({}, 1)
    )
    run.holds(tmp_path, kept=("cause",))


def test_one_bad_request_of_three_in_a_night_is_nothing(tmp_path: Path) -> None:
    run = Run()
    run.up(gauge((300, 1)))
    run.add("inferscope_requests_running", gauge((300, 0)))
    # Two good ones and a bad one, more than an hour apart.
    run.requests("ttft", good="0x239 1x599 2x359", bad="0x559 1x639", model_name="daily")
    run.requests("ttft", good="0x239 1x599 2x359", bad="0x559 1x639")
    run.never_fired(299)
    run.holds(tmp_path)


def test_few_requests_most_of_them_bad_are_a_ticket(tmp_path: Path) -> None:
    run = Run()
    run.healthy(120)
    run.requests("ttft", good=counter((60, 0.1), (60, 0.01)), bad=counter((60, 0), (60, 0.09)))
    run.ask(119, "count_over_time(ALERTS{severity='page', alertstate='firing'}[2h])")
    run.fires(110, f"{INSTANCE}/{TTFT}", f"{SLOW}/{TTFT}")
    run.holds(tmp_path)


def test_a_trickle_of_bad_requests_is_a_ticket_also_between_them(tmp_path: Path) -> None:
    run = Run()
    run.up(gauge((470, 1)), model_name="daily")
    run.add("inferscope_requests_running", gauge((470, 0)), model_name="daily")
    # Six bad ones at once, every four hours: never ten in six hours but around the second time.
    run.requests("ttft", good=gauge((470, 0)), bad="0x119 6x959 12x799", model_name="daily")
    run.ask(265, "count_over_time(ALERTS{alertstate='firing'}[265m])")
    run.fires(465, f"{TRICKLE}/daily/ttft")
    run.holds(tmp_path)


def test_silence_after_an_outage_and_a_healthy_hour_is_no_ticket(tmp_path: Path) -> None:
    outage, healthy, silence = 60, 60, 24 * 60
    whole = outage + healthy + silence
    run = Run()
    run.up(gauge((whole, 1)))
    run.add("inferscope_requests_running", gauge((whole, 0)))
    run.requests(
        "ttft",
        good=counter((outage, 0.0), (healthy, 0.5), (silence, 0.0)),
        bad=counter((outage, 0.5), (healthy, 0.0), (silence, 0.0)),
    )
    run.ask(outage, f"count(ALERTS{{alertname='{FAST}', alertstate='firing'}})", ({}, 1))
    for hours in (12, 24):
        run.fires(outage + healthy + 60 * hours - 1)
    ticket = f"ALERTS{{alertname='{TRICKLE}', alertstate='firing'}}"
    run.ask(whole - 1, f"count_over_time({ticket}[{whole}m])")
    # Evaluated eight times less often than the sums assume: they count an eighth of the requests.
    run.holds(tmp_path, every_s=8 * FAST_INTERVAL_S)


def test_a_rolling_deploy_is_nothing(tmp_path: Path) -> None:
    run = Run()
    for number, at in enumerate((60, 70, 80)):
        host = f"host-{number}"
        left = 180 - at - 1
        old, new = ({"instance": host, "engine_id": f"{age}-{number}"} for age in ("old", "new"))
        run.series[f'up{{instance="{host}", job="inferscope"}}'] = gauge((at, 1), (1, 0), (left, 1))
        for of, pieces in ((old, [(at, 1)]), (new, [(left, 1)])):
            lead = "" if of is old else f"_x{round((at + 1) * 4)} "
            tail = f" {gone(5)}" if of is old else ""

            def series_of(values: str, lead: str = lead, tail: str = tail) -> str:
                return lead + values + tail

            ((minutes, _),) = pieces
            run.add("inferscope_source_up", series_of(gauge((minutes, 1))), source="probe", **of)
            run.add("inferscope_requests_running", series_of(gauge((minutes, 8))), **of)
            run.add(
                "inferscope_step_duration_seconds_count",
                series_of(counter((minutes, 20))),
                phase="decode",
                **of,
            )
            for slo in ("ttft", "availability"):
                run.requests(
                    slo,
                    good=series_of(counter((minutes, 2.0))),
                    # Two requests of each old engine are not let finish.
                    bad=series_of(
                        counter((minutes - 1, 0), (1, 2 / 60))
                        if of is old
                        else counter((minutes, 0))
                    ),
                    **of,
                )
    run.never_fired(175)
    run.holds(tmp_path)


@pytest.mark.parametrize("scrape_s", [5, 15])
@pytest.mark.parametrize("is_chunked", [True, False])
def test_a_prefill_of_forty_seconds_is_no_stall(
    tmp_path: Path, is_chunked: bool, scrape_s: int
) -> None:
    run = Run(scrape_s)
    before, under_way = 1800 // scrape_s, 40 // scrape_s
    run.add("inferscope_source_up", f"1x{2 * before}", source="probe")
    run.add("inferscope_requests_running", f"1x{2 * before}")
    last = 20 * scrape_s * before
    steps = f"0+{20 * scrape_s}x{before} "
    # In one step, or with a chunk of it that ends at every second scrape.
    steps += " ".join(str(last + (at // 2 if is_chunked else 0)) for at in range(under_way))
    run.steps(f"{steps} {last + 20}+{20 * scrape_s}x{before}")
    run.never_fired(59)
    run.holds(tmp_path, options=RuleOptions(scrape_s=scrape_s))


def test_an_engine_that_has_just_begun_to_work_is_no_stall(tmp_path: Path) -> None:
    run = Run()
    run.up(gauge((120, 1)))
    # Idle for an hour and a half, then a request whose first step takes forty seconds.
    run.add("inferscope_requests_running", gauge((90, 0), (30, 1)))
    run.steps(counter((10, 20), (80.75, 0), (29.25, 1)))
    # Another engine gets a request now and then, and none is waiting.
    of = {"engine_id": "left"}
    run.add("inferscope_source_up", gauge((120, 1)), source="probe", **of)
    run.add("inferscope_requests_running", "0x239 " + "1 0 0 0 " * 60, **of)
    run.steps(counter((10, 20), (110, 0)), **of)
    # A new one compiles for four minutes, with requests waiting for it from the start.
    of = {"engine_id": "new"}
    run.add("inferscope_source_up", gauge((120, 1)), source="probe", **of)
    run.add("inferscope_requests_running", f"_x200 {gauge((20, 4))}", **of)
    run.steps(f"_x200 {counter((4, 0), (16, 20))}", **of)
    run.never_fired(70)
    run.never_fired(119)
    run.holds(tmp_path)


def test_a_hung_engine_stalls_and_burns(tmp_path: Path) -> None:
    run = Run()
    run.up(gauge((120, 1)))
    run.add("inferscope_requests_running", gauge((120, 8)))
    run.steps(counter((60, 20), (60, 0)))
    run.requests(
        "ttft", good=counter((60, 2.0), (60, 0)), bad=counter((60, 0.0), (60, 2.0)), cause="paused"
    )
    run.fires(59)
    run.ask(62, "ALERTS{severity='page', alertstate='firing'}", (
        {
            "__name__": "ALERTS", "alertname": STALLED, "alertstate": "firing", "model": "m",
            "severity": "page",
        },
        1,
    ))  # fmt: skip
    run.fires(80, STALLED, *BURNING)
    run.expect_alert(
        80, STALLED, {"severity": "page", "model": "m"},
        worst_instance="a at host, 8 requests running",
        summary="m: 1 engines have requests and run no step",
    )  # fmt: skip
    run.holds(tmp_path, kept=("worst_instance", "summary"))


def test_a_stall_is_seen_sooner_with_more_scrapes(tmp_path: Path) -> None:
    run = Run(scrape_s=5)
    run.add("inferscope_source_up", "1x720", source="probe")
    run.add("inferscope_requests_running", "8x720")
    run.steps("0+100x360 36000x360")
    run.fires(30.5)
    run.fires(31, STALLED)
    run.holds(tmp_path, options=RuleOptions(scrape_s=5))


def test_an_engine_that_is_paused_is_no_stall_until_it_goes_on(tmp_path: Path) -> None:
    run = Run()
    for name, pauses in (("paused", 1), ("hung", 0)):
        of = {"engine_id": name, "model_name": name}
        run.up(gauge((200, 1)), **of)
        run.add("inferscope_requests_running", gauge((200, 8)), **of)
        run.steps(counter((30, 20), (170, 0)), **of)
        # For ten minutes; another time for two hours, after which nothing was made in the hour.
        run.add(
            "inferscope_engine_paused",
            gauge((30, 0), (10, pauses), (20, 0), (130, pauses), (10, 0)),
            **of,
        )
    run.fires(39.5, f"{STALLED}/hung")
    run.fires(40.5, f"{STALLED}/hung")
    run.fires(42, f"{STALLED}/hung", f"{STALLED}/paused")  # it hangs now
    run.fires(61, f"{STALLED}/hung")
    run.fires(194, f"{STALLED}/hung")
    run.fires(197, f"{STALLED}/hung", f"{STALLED}/paused")
    run.holds(tmp_path)


def queue(run: Run, *, running: str, admissible: str, admissions: str, **of: str) -> None:
    """Add the queue of an engine: requests that run and that could, and admissions."""
    run.add("inferscope_requests_running", running, **of)
    run.add("inferscope_requests_waiting", admissible, **of)
    run.add("inferscope_requests_admissible", admissible, **of)
    run.add("inferscope_admissions_total", admissions, **of)


@pytest.mark.parametrize("running", [0, 3])
def test_an_engine_that_admits_none_of_its_queue_pages(tmp_path: Path, running: int) -> None:
    run = Run()
    run.up(gauge((240, 1)))
    # For three hours: in the last two of them no step has ended in the hour before.
    queue(
        run,
        running=gauge((30, 1), (210, running)),
        admissible=gauge((30, 0), (200, 6), (10, 0)),
        admissions=counter((30, 2.0), (200, 0), (10, 2.0)),
    )
    run.steps(counter((30, 20), (200, 20 if running else 0), (10, 20)))
    run.fires(30.5)
    for minute in (31.5, 60, 89, 92, 140, 229):
        run.fires(minute, NOT_ADMITTING)
    run.expect_alert(
        31.5, NOT_ADMITTING, {"severity": "page", "model": "m"},
        worst_instance="a at host, 6 requests waiting",
        summary="m: 1 engines admit none of the requests that wait",
    )  # fmt: skip
    since = f"ALERTS_FOR_STATE{{alertname='{NOT_ADMITTING}'}}[200m]"
    run.ask(229, f"count(max_over_time({since}) == min_over_time({since}))", ({}, 1))
    run.fires(232)
    run.holds(tmp_path, kept=("worst_instance", "summary"))


def test_a_queue_that_has_to_wait_or_moves_does_not_page(tmp_path: Path) -> None:
    run, minutes = Run(), 60
    for name, admissible, admissions in (
        # Full slots or KV blocks, and a prefill of forty seconds, leave nothing admissible.
        ("full", gauge((minutes, 0)), counter((10, 2.0), (50, 0))),
        ("long-prefill", "0x119 0 0 0 0x117", counter((30, 2.0), (1, 0), (29, 2.0))),
        # The step after that one admits those that have come meanwhile, or the next ones.
        ("busy", gauge((minutes, 2)), counter((minutes, 0.1))),
        ("idle", gauge((minutes, 0)), counter((10, 1.0), (50, 0))),
        # One waits for half a minute, now and then, beside a long decode.
        ("now-and-then", "1 1 0 0 " * 60, gauge((minutes, 7))),
        # A decode worker of a disaggregated engine, and an engine of which no core is observed.
        ("decode-worker", "_x240", counter((10, 1.0), (50, 0))),
        ("unobserved", "_x240", "_x240"),
    ):
        of = {"engine_id": name, "model_name": name}
        run.up(gauge((minutes, 1)), **of)
        queue(run, running=gauge((minutes, 1)), admissible=admissible, admissions=admissions, **of)
        run.add("inferscope_requests_waiting", gauge((minutes, 6)), **of)
        run.steps(counter((minutes, 20)), **of)
    run.never_fired(59)
    run.holds(tmp_path)


def test_an_engine_that_has_just_started_has_five_minutes_to_admit(tmp_path: Path) -> None:
    run = Run()
    # Its model is loaded, or its first step compiled, while requests wait from the start.
    for name, minutes in (("loads", 4), ("never", 20)):
        of = {"engine_id": name, "model_name": name}
        lead = "_x120 "
        run.add("inferscope_source_up", gauge((60, 1)), source="probe", **of)
        queue(
            run,
            running=lead + gauge((minutes, 0), (30 - minutes, 1)),
            admissible=lead + gauge((minutes, 4), (30 - minutes, 0)),
            admissions=lead + counter((minutes, 0), (30 - minutes, 1)),
            **of,
        )
        run.steps(lead + counter((minutes, 0), (30 - minutes, 20)), **of)
    run.fires(34.5)
    run.fires(36, f"{NOT_ADMITTING}/never")
    run.fires(52)
    run.holds(tmp_path)


def test_a_paused_engine_and_a_scrape_gap_are_no_fault_of_the_scheduler(tmp_path: Path) -> None:
    run = Run()
    pieces = {
        "stuck": ("inferscope_engine_paused", gauge((60, 0))),
        "paused": ("inferscope_engine_paused", gauge((30, 0), (20, 1), (10, 0))),
        "off": ("inferscope_source_up", gauge((30, 1), (30, 0))),
        # The collector is 20 s behind from then on.
        "behind": ("inferscope_folded_timestamp_seconds", "0+15x119 1780+15x120"),
    }
    for name, (metric, values) in pieces.items():
        of = {"engine_id": name, "model_name": name}
        run.up(gauge((60, 1)), **of)
        queue(
            run,
            running=gauge((60, 0)),
            admissible=gauge((30, 0), (30, 6)),
            admissions=counter((30, 2.0), (30, 0)),
            **of,
        )
        run.steps(counter((30, 20), (30, 0)), **of)
        source = {"source": "probe"} if metric == "inferscope_source_up" else {}
        run.add(metric, values, **source, **of)
    # Two minutes without a scrape: a request waits before them, and another one after.
    of = {"engine_id": "gap", "model_name": "gap"}
    run.up(gauge((60, 1)), **of)
    for metric, before, after in (
        ("inferscope_requests_admissible", "0x118 1", "1 0x110"),
        ("inferscope_admissions_total", "0+30x119", "3900+30x111"),
        ("inferscope_requests_running", "1x119", "1x111"),
    ):
        run.add(metric, f"{before} _x8 {after}", **of)
    run.steps("0+300x119 _x8 38400+300x111", **of)
    fired = 'count by (model) (count_over_time(ALERTS{alertname="%s", alertstate="firing"}[%s]))'
    run.ask(50, fired % (NOT_ADMITTING, "50m"), ({"model": "stuck"}, 1))
    run.ask(59, fired % (NOT_ADMITTING, "59m"), ({"model": "stuck"}, 1), ({"model": "paused"}, 1))
    run.holds(tmp_path)


def test_a_rank_that_hangs_pages_before_a_stall(tmp_path: Path) -> None:
    run = Run(scrape_s=5)
    run.add("inferscope_source_up", "1x720", source="probe")
    run.add("inferscope_requests_running", "8x720")
    run.steps("0+100x360 36000x360")
    # Idle, ranks are silent for ten seconds, or some more where the host is busy; then one hangs.
    idle, overdue = "0 4 8 12 " * 90, "inferscope_rank_overdue_seconds"
    run.add(overdue, f"{idle} 4+5x359", rank="1")
    run.add(overdue, f"{idle} 0x359", rank="0")
    run.fires(29.9)
    run.fires(30.5, RANK_HUNG)
    labels = {"severity": "page", "model": "m"}
    run.expect_alert(30.5, RANK_HUNG, labels, worst_rank="rank 1 of a at host, for 34s")
    run.fires(32, RANK_HUNG, STALLED)
    options = RuleOptions(scrape_s=5)
    run.holds(tmp_path, kept=("worst_rank",), options=options, every_s=10.0)


def test_a_collector_that_is_behind_has_not_seen_a_stall(tmp_path: Path) -> None:
    run = Run()
    run.healthy(30)
    # For 70 s, and forever: the engine's state is unknown meanwhile.
    for name, num_still in (("briefly", 5), ("for-good", 120)):
        of = {"engine_id": name, "model_name": name}
        run.add("inferscope_source_up", gauge((60, 1)), source="probe", **of)
        run.add("inferscope_requests_running", gauge((60, 8)), **of)
        after = 120 + num_still
        run.steps(f"0+300x119 35700x{num_still - 1} {300 * after}+300x{max(0, 239 - after)}", **of)
        run.add(
            "inferscope_folded_timestamp_seconds",
            f"0+15x119 1785x{num_still - 1} {15 * after}+15x{max(0, 239 - after)}",
            **of,
        )
    stalled = f'ALERTS{{alertname="{STALLED}", alertstate="firing"}}'
    run.ask(59, f"count_over_time({stalled}[59m])")
    run.fires(31.5)
    run.fires(34.5, f"{BLIND}/for-good")
    run.expect_alert(35, BLIND, {"severity": "page", "model": "for-good"}, cause="collector_behind")
    run.holds(tmp_path, kept=("cause",))


def test_a_collector_a_little_behind_for_minutes_is_a_ticket(tmp_path: Path) -> None:
    run = Run()
    for name, late_s in (("m", 30), ("timely", 10)):
        of = {"engine_id": name, "model_name": name}
        run.healthy(60, **of)
        folded = f"0+15x119 {1800 - late_s}+15x119"
        run.add("inferscope_folded_timestamp_seconds", folded, **of)
    run.fires(34)
    run.fires(36, BEHIND)
    run.ask(36, 'ALERTS{severity="page"}')
    run.holds(tmp_path)


def test_a_killed_engine_burns_and_is_neither_stalled_nor_unseen(tmp_path: Path) -> None:
    run = Run()
    run.series['up{instance="host", job="inferscope"}'] = gauge((120, 1))
    run.add("inferscope_source_up", gauge((60, 1), (60, 0)), source="probe")
    run.add("inferscope_requests_running", f"{gauge((60, 64))} {gone(60)}")
    run.steps(counter((60, 20), (60, 0)))
    run.requests(
        "availability",
        good=counter((60, 1.0), (60, 0)),
        bad=f"{gauge((60, 0))} {gauge((60, 64))}",
        cause="engine_lost",
    )
    of = {"severity": "page", "model": "m", "slo": "availability"}
    run.expect_alert(64, FAST, of, cause="engine_lost")
    run.ask(110, f"count_over_time(ALERTS{{alertname=~'{STALLED}|{BLIND}'}}[110m])")
    run.holds(tmp_path, kept=("cause",))


@pytest.mark.parametrize("reason", ["not_scraped", "probe_off", "collector_behind", "not_counted"])
def test_what_is_not_seen_is_reported(tmp_path: Path, reason: str) -> None:
    run = Run()
    is_so = {name: name == reason for name in ("not_scraped", "probe_off", "collector_behind")}
    target = gauge((30, 1), (30, 0)) if is_so["not_scraped"] else gauge((60, 1))
    run.series['up{instance="host", job="inferscope"}'] = target
    probe = gauge((30, 1), (30, 0)) if is_so["probe_off"] else gauge((60, 1))
    seen = f"{gauge((30, 8))} {gone(30)}" if is_so["not_scraped"] else gauge((60, 8))
    if is_so["not_scraped"]:
        probe = f"{gauge((30, 1))} {gone(30)}"
    run.add("inferscope_source_up", probe, source="probe")
    run.add("inferscope_requests_running", seen)
    if is_so["probe_off"]:  # it records no steps then: not a stall
        run.steps(counter((30, 20), (30, 0)))
    # The tests' clock begins at 0.
    behind = "0+15x119 1785x120" if is_so["collector_behind"] else "0+15x240"
    if not is_so["not_scraped"]:
        run.add("inferscope_folded_timestamp_seconds", behind)
    coverage = gauge((30, 1), (30, 0.9)) if reason == "not_counted" else gauge((60, 0.97))
    if not is_so["not_scraped"]:
        run.add("inferscope_attribution_coverage_ratio", coverage, gpu="g")
    run.fires(29)
    run.fires(34.5, BLIND)
    run.expect_alert(36, BLIND, {"severity": "page", "model": "m"}, cause=reason)
    run.holds(tmp_path, kept=("cause",))


def test_a_host_that_was_taken_away_is_not_unseen(tmp_path: Path) -> None:
    run = Run()
    run.series['up{instance="host", job="inferscope"}'] = f"{gauge((30, 1))} {gone(60)}"
    run.add("inferscope_source_up", f"{gauge((30, 1))} {gone(60)}", source="probe")
    run.add("inferscope_requests_running", f"{gauge((30, 1))} {gone(60)}")
    run.never_fired(89)
    run.holds(tmp_path)


def test_a_full_kv_cache_is_a_ticket_where_requests_wait_for_it(tmp_path: Path) -> None:
    run = Run()
    for name, waiting in (("full", 3), ("content", 0)):
        of = {"engine_id": name, "model_name": name}
        run.healthy(60, **of)
        run.add("inferscope_kv_cache_usage_ratio", gauge((20, 0.5), (40, 0.99)), **of)
        run.add("inferscope_requests_waiting", gauge((60, waiting)), **of)
    run.fires(28)
    run.fires(32, f"{KV}/full")
    run.holds(tmp_path)


def test_a_storm_of_preemptions_is_a_ticket(tmp_path: Path) -> None:
    run = Run()
    for name, lost_s in (("stormy", 2.0), ("calm", 0.2)):
        of = {"engine_id": name, "model_name": name}
        run.healthy(60, **of)
        run.add("inferscope_requests_total", counter((60, 1)), finish_reason="stop", **of)
        run.add("inferscope_latency_seconds_total", counter((60, 6)), cause="decode_own", **of)
        for cause in ("preempted", "recompute"):
            lost = counter((20, 0), (40, lost_s))
            run.add("inferscope_latency_seconds_total", lost, cause=cause, **of)
    run.fires(19)
    run.fires(40, f"{PREEMPTIONS}/stormy")
    run.holds(tmp_path)


def test_the_worst_engine_of_many_is_a_ticket_that_names_it(tmp_path: Path) -> None:
    run = Run()
    for number in range(20):
        of = {"engine_id": f"e{number}"}
        run.healthy(60, **of)
        bad_s = 0.4 if number == 7 else 0.0
        run.requests("ttft", good=counter((60, 2.0)), bad=counter((60, bad_s)), **of)
    run.fires(55, f"{INSTANCE}/{TTFT}")
    labels = {"severity": "ticket", "model": "m", "slo": "ttft"}
    worst = "e7 at host, 16.67% bad"
    run.expect_alert(55, INSTANCE, labels, worst_instance=worst, command="inferscope findings e7")
    run.holds(tmp_path, kept=("worst_instance", "command"))
