from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from inferscope.attribution.breach import (
    OWN_WORK,
    Breach,
    LatencyLimit,
    breaches,
    is_met,
    top_cause,
)
from inferscope.attribution.metric_breakdown import METRICS, LedgerView, Metric
from inferscope.records import CAUSES

MS = 1_000_000


@dataclass(frozen=True)
class Lived:
    """A finished request whose parts are given: before the first token, after it, in delivery."""

    before: dict[str, int]
    after: dict[str, int] = field(default_factory=dict)
    delivery_ns: int = 0
    num_gaps: int = 10
    prompt_tokens: int | None = 100
    finish: str = "length"
    joined_late: bool = False
    is_in_one_piece: bool = False

    arrived_ns: int = 7
    unseen_ns: int = 0
    """Before its first token, in no row."""
    longest_part: float = 0.5

    @property
    def output_tokens(self) -> int:
        return self.num_gaps + 1

    @property
    def first_token_ns(self) -> int | None:
        return self.arrived_ns + self.unseen_ns + sum(self.before.values())

    @property
    def last_token_ns(self) -> int | None:
        return (self.first_token_ns or 0) + sum(self.after.values())

    @property
    def delivered_ns(self) -> int:
        return (self.last_token_ns or 0) + self.delivery_ns

    @property
    def ttft_ledger_ns(self) -> dict[str, int]:
        return self.before

    @property
    def ledger_ns(self) -> dict[str, int]:
        whole = dict(self.before)
        for cause, ns in (*self.after.items(), ("delivery", self.delivery_ns)):
            whole[cause] = whole.get(cause, 0) + ns
        return {cause: ns for cause, ns in whole.items() if ns}

    @property
    def tbt_ns(self) -> list[int]:
        if not self.num_gaps:
            return []
        whole_ns = sum(self.after.values())
        longest_ns = round(whole_ns * self.longest_part)
        short_ns, more = divmod(whole_ns - longest_ns, max(1, self.num_gaps - 1))
        if self.num_gaps == 1:
            return [whole_ns]
        return [longest_ns, *([short_ns + 1] * more), *([short_ns] * (self.num_gaps - 1 - more))]

    @property
    def longest_gap_ns(self) -> int:
        return max(self.tbt_ns, default=0)


_lived: LedgerView = Lived({})  # the protocol is met

amounts = st.dictionaries(st.sampled_from(CAUSES), st.integers(1, 10**10), min_size=1, max_size=8)
lives = st.builds(
    Lived, amounts, amounts, delivery_ns=st.integers(0, 10**9), num_gaps=st.integers(1, 50)
)
whole_spans = st.sampled_from([metric for metric in METRICS if metric != "tbt"])


def breach_of(
    life: Lived, metric: Metric, limit_ns: int, peers: list[Lived] | None = None
) -> Breach:
    (breach,) = breaches(life, [LatencyLimit(metric, limit_ns)], peers or [])
    return breach


@given(lives, whole_spans, st.integers(0, 10**10))
def test_without_the_minimal_set_it_passes_and_without_any_less_it_does_not(
    life: Lived, metric: Metric, limit_ns: int
) -> None:
    missed = breaches(life, [LatencyLimit(metric, limit_ns)])
    assume(missed)
    (breach,) = missed
    took_ns = {one.cause: one.ns for one in breach.causes}
    assert sum(took_ns[cause] for cause in breach.minimal_set) >= breach.over_ns
    fewer = len(breach.minimal_set) - 1
    for subset in combinations(breach.minimal_set, fewer):
        assert sum(took_ns[cause] for cause in subset) < breach.over_ns


@given(lives, whole_spans, st.integers(0, 10**10))
def test_its_causes_sum_to_what_it_took_and_each_states_whether_it_suffices(
    life: Lived, metric: Metric, limit_ns: int
) -> None:
    missed = breaches(life, [LatencyLimit(metric, limit_ns)])
    assume(missed)
    (breach,) = missed
    assert sum(one.ns for one in breach.causes) == breach.over_ns + limit_ns * breach.num_gaps
    assert all(one.is_sufficient is (one.ns >= breach.over_ns) for one in breach.causes)


@given(lives, whole_spans, st.integers(0, 10**10))
def test_own_work_is_to_blame_only_where_all_else_does_not_suffice(
    life: Lived, metric: Metric, limit_ns: int
) -> None:
    missed = breaches(life, [LatencyLimit(metric, limit_ns)])
    assume(missed)
    (breach,) = missed
    others_ns = sum(one.ns for one in breach.causes if one.cause not in OWN_WORK)
    if others_ns >= breach.over_ns:
        assert not breach.is_for_own_work


@given(lives, st.sampled_from(METRICS), st.integers(0, 10**10))
def test_what_is_met_is_no_breach(life: Lived, metric: Metric, limit_ns: int) -> None:
    objective = LatencyLimit(metric, limit_ns)
    assert is_met(life, objective) is (not breaches(life, [objective]))


@given(
    st.dictionaries(st.sampled_from(CAUSES), st.integers(1, 10**9), min_size=1),
    st.sampled_from(CAUSES),
    st.integers(1, 10**9),
)
def test_what_was_added_is_named_however_small_beside_the_normal_work(
    normal: dict[str, int], cause: str, extra_ns: int
) -> None:
    peers = [Lived(normal) for _ in range(5)]
    slow = Lived({**normal, cause: normal.get(cause, 0) + extra_ns})
    breach = breach_of(slow, "ttft", sum(normal.values()), peers)
    assert (breach.top, breach.num_peers, breach.over_ns) == (cause, 5, extra_ns)
    assert breach.causes[0].excess_ns == extra_ns


@pytest.mark.parametrize("metric", ["tbt", "tpot"])
def test_longer_answers_are_compared_by_the_token(metric: Metric) -> None:
    peers = [Lived({}, {"decode_own": 10 * MS, "output": MS}, num_gaps=10) for _ in range(9)]
    slow = Lived({}, {"decode_own": 101 * MS, "output": 10 * MS, "slowdown": 20 * MS}, num_gaps=100)
    breach = breach_of(slow, metric, round(1.3 * MS) if metric == "tpot" else 10 * MS, peers)
    assert breach.top == "slowdown"
    assert {one.cause: one.excess_ns for one in breach.causes} == {
        "slowdown": 20 * MS,
        "decode_own": MS,
        "output": 0,
    }


def test_peers_are_those_of_its_own_time() -> None:
    """The host was slow for an hour, and every request met the objective all the same."""
    then = [Lived({"cpu_gap": 80 * MS, "prefill_own": MS}, arrived_ns=at) for at in range(300)]
    now = [Lived({"cpu_gap": MS, "prefill_own": MS}, arrived_ns=10**12 + at) for at in range(60)]
    late = Lived({"cpu_gap": 70 * MS, "queue": 40 * MS}, arrived_ns=10**12)
    breach = breach_of(late, "ttft", 100 * MS, then + now)
    assert (breach.top, breach.num_peers) == ("cpu_gap", 50)
    assert breach_of(late, "ttft", 100 * MS, then).top == "queue"


def test_peers_are_of_like_length_ended_alike_were_seen_whole_and_met_it() -> None:
    like = [Lived({"queue": 100 * MS, "prefill_own": 10 * MS}) for _ in range(5)]
    unlike = [
        Lived({"queue": MS}, prompt_tokens=201),
        Lived({"queue": MS}, prompt_tokens=49),
        Lived({"queue": MS}, prompt_tokens=None),
        Lived({"queue": MS}, finish="client_cancel"),
        Lived({"queue": MS}, joined_late=True),
        Lived({"queue": 900 * MS}),
    ]
    breach = breach_of(
        Lived({"queue": 130 * MS, "prefill_own": 90 * MS}), "ttft", 200 * MS, like + unlike
    )
    assert breach.num_peers == 5
    assert breach.top == "prefill_own"


def test_without_peers_the_only_cause_that_suffices_is_named_and_of_two_none() -> None:
    life = Lived({"queue": 401 * MS, "cpu_gap": 311 * MS, "prefill_own": 100 * MS})
    clear, unclear = (breach_of(life, "ttft", ms * MS) for ms in (500, 600))
    assert (clear.over_ns, clear.top, clear.minimal_set) == (312 * MS, "queue", ("queue",))
    assert (unclear.top, unclear.minimal_set) == (None, ("queue",))
    assert top_cause(life, [LatencyLimit("ttft", 500 * MS)]) == "queue"


def test_without_peers_a_queue_is_one_wait_with_a_step_running_or_without() -> None:
    for gap_ms, cause in ((350, "queue"), (351, None)):
        queued = {"queue": 400 * MS, "queue_idle": 300 * MS, "cpu_gap": gap_ms * MS}
        assert breach_of(Lived(queued), "ttft", 500 * MS).top == cause


def test_without_peers_a_wait_twice_as_long_as_all_others_is_the_cause() -> None:
    for queue_ms, cause in ((599, None), (600, "queue")):
        own = {"prefill_own": 900 * MS, "slowdown": 200 * MS, "cpu_gap": 100 * MS}
        overloaded = Lived(own | {"queue": queue_ms * MS})
        limit_ns = sum(own.values()) + (queue_ms - 100) * MS
        assert breach_of(overloaded, "ttft", limit_ns - 90 * MS).over_ns == 190 * MS
        assert breach_of(overloaded, "ttft", limit_ns - 90 * MS).top == cause


def test_without_peers_own_work_that_alone_misses_the_objective_is_the_cause() -> None:
    life = Lived({"prefill_own": 300 * MS, "queue": 400 * MS, "slowdown": 350 * MS})
    assert breach_of(life, "ttft", 50 * MS).top == "prefill_own"
    assert breach_of(life, "ttft", 301 * MS).top is None
    assert breach_of(life, "ttft", 50 * MS, [Lived({"prefill_own": 40 * MS})] * 5).top == "queue"


def test_unobserved_time_has_no_top_cause() -> None:
    life = Lived({"queue": 105 * MS}, joined_late=True, unseen_ns=100 * MS)
    assert breach_of(life, "ttft", 201 * MS).top is None
    assert (
        breach_of(life, "ttft", 201 * MS, [Lived({"queue": MS}) for _ in range(9)]).top == "queue"
    )
    assert breach_of(life, "ttft", 201 * MS, [Lived({"queue": 9 * MS})] * 9).top is None


def test_a_gap_proves_nothing_of_single_causes_but_rules_out_the_short_ones() -> None:
    life = Lived({}, {"decode_interference": 50 * MS, "output": MS}, num_gaps=10)
    breach = breach_of(life, "tbt", 10 * MS)
    is_sufficient = {one.cause: one.is_sufficient for one in breach.causes}
    assert is_sufficient == {"decode_interference": None, "output": False}
    assert (breach.top, breach.minimal_set) == ("decode_interference", ())
    assert breach.actual_ns == max(life.tbt_ns)


def test_an_answer_in_one_piece_has_no_first_token_to_wait_for() -> None:
    life = Lived({"queue": 9 * MS}, {}, num_gaps=0, is_in_one_piece=True)
    asked = [LatencyLimit(metric, MS) for metric in METRICS]
    assert [breach.metric for breach in breaches(life, asked)] == ["e2e", "delivered"]


def test_delivery_counts_up_to_the_last_byte_only() -> None:
    life = Lived({"prefill_own": 5 * MS}, {"decode_own": 5 * MS}, delivery_ns=300 * MS)
    assert is_met(life, LatencyLimit("e2e", 10 * MS))
    assert breach_of(life, "delivered", 20 * MS).top == "delivery"
