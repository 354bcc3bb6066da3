"""Sentences on objectives agree with the breach."""

from __future__ import annotations

from dataclasses import replace

from inferscope.attribution.blame_shares import BlameShare
from inferscope.attribution.breach import Breach, BreachCause, LatencyLimit, breaches
from inferscope.insight.facts import Facts
from inferscope.text.explanation import why
from inferscope.text.verdicts import verdicts
from tests.attribution.test_breach import MS, Lived
from tests.insight.test_why import made

FACTS = made({"queue": 10}, 0, is_over=True, joined_late=False)


def judged(life: Lived, *objectives: LatencyLimit, peers: tuple[Lived, ...] = ()) -> Facts:
    return replace(FACTS, objectives=objectives, breaches=breaches(life, objectives, peers))


def test_the_fewest_causes_are_listed_with_their_time() -> None:
    life = Lived({"queue": 300 * MS, "cpu_gap": 200 * MS, "prefill_own": 100 * MS})
    (line,) = verdicts(judged(life, LatencyLimit("ttft", 150 * MS)))
    assert "It missed TTFT 150.0 ms by 450.0 ms." in line
    assert (
        "Without queue (300.0 ms) and cpu_gap (200.0 ms) it would have met the objective." in line
    )
    assert "Too few compliant requests" in line
    assert "Main cause" not in line


def test_what_would_have_let_it_pass_is_marked_as_of_first_order() -> None:
    life = Lived({"queue": 300 * MS, "prefill_own": 100 * MS})
    facts = judged(life, LatencyLimit("ttft", 150 * MS))
    assert any("first-order estimate" in caveat for caveat in why(facts).caveats)
    assert not any("first-order estimate" in caveat for caveat in why(FACTS).caveats)


def test_own_work_that_is_too_slow_by_itself_is_named() -> None:
    life = Lived({"queue": 10 * MS, "prefill_own": 900 * MS})
    (line,) = verdicts(judged(life, LatencyLimit("ttft", 500 * MS)))
    assert "missed it without other requests too: its own work takes 900.0 ms" in line
    assert "Main cause: prefill_own" in line


def test_of_gaps_only_the_long_enough_causes_are_suspects() -> None:
    life = Lived({}, {"preempted": 80 * MS, "output": MS}, num_gaps=10)
    (line,) = verdicts(judged(life, LatencyLimit("tbt", 20 * MS)))
    assert "Only preempted took long enough" in line


def test_peers_are_counted_and_small_differences_left_out() -> None:
    peers = tuple(Lived({"queue": 10 * MS, "cpu_gap": 5 * MS}) for _ in range(7))
    life = Lived({"queue": 400 * MS, "cpu_gap": 6 * MS})
    (line,) = verdicts(judged(life, LatencyLimit("ttft", 100 * MS), peers=peers))
    assert "median of 7 compliant requests of similar length: queue +390.0 ms." in line


def test_a_request_under_way_is_not_judged() -> None:
    facts = made({"queue": 10}, 0, is_over=False, joined_late=False)
    (line,) = verdicts(replace(facts, objectives=(LatencyLimit("e2e", MS),)))
    assert line == "E2E 1.0 ms: judged when it finishes."


def test_a_cause_of_a_newer_version_is_named_as_it_is() -> None:
    breach = Breach(
        metric="ttft", limit_ns=MS, actual_ns=3 * MS, over_ns=2 * MS, num_gaps=1,
        causes=(BreachCause("warp", 3 * MS, True),), top="warp", minimal_set=("warp",), num_peers=0,
    )  # fmt: skip
    facts = replace(FACTS, objectives=(LatencyLimit("ttft", MS),), breaches=(breach,))
    assert "Main cause: warp (a cause of a newer version)" in verdicts(facts)[0]


def test_contributors_of_a_cause_come_from_blame() -> None:
    life = Lived({"preempted": 300 * MS, "prefill_own": 10 * MS})
    blame = (
        BlameShare("queue", "bystander", 9),
        BlameShare("preempted", "holder", 75),
        BlameShare("preempted", None, 25),
    )
    facts = replace(judged(life, LatencyLimit("ttft", 100 * MS)), blame=blame)
    (line,) = verdicts(facts)
    assert line.endswith(
        "Main cause: preempted (evicted, waiting to resume); over the whole request, due to holder"
        " (75.0%) and others."
    )
    (unknown,) = verdicts(replace(facts, blame=()))
    assert unknown.endswith("Main cause: preempted (evicted, waiting to resume).")
