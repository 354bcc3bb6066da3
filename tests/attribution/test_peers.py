"""Peers that are kept: what is remembered of them is what looking again would show."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.attribution.breach import LatencyLimit, breaches
from inferscope.attribution.peers import PeerRecord, Peers, remembered
from tests.attribution.test_breach import MS, Lived, lives

objectives = st.builds(
    LatencyLimit, st.sampled_from(("ttft", "tbt", "tpot", "e2e")), st.integers(1, 10**10)
)


@given(
    came=st.lists(st.tuples(lives, st.integers(0, 10**10)), min_size=1, max_size=40),
    asked=st.lists(objectives, min_size=1, max_size=3),
    most=st.integers(1, 12),
)
def test_kept_peers_explain_a_breach_as_a_list_of_the_newest_does(
    came: list[tuple[Lived, int]], asked: list[LatencyLimit], most: int
) -> None:
    peers, seen = Peers(most=most), list[Lived]()
    for number, (life, arrived_ns) in enumerate(came):
        request = replace(life, arrived_ns=arrived_ns)
        # Not every objective is missed each time: what is remembered of each is of another age.
        limits = asked[: 1 + number % len(asked)]
        assert breaches(request, limits, peers) == breaches(request, limits, seen[-most:])
        peers.append(request)
        seen.append(request)
    assert list(peers) == seen[-most:]
    assert peers.newest() is seen[-1]


@pytest.mark.thorough
@given(
    came=st.lists(lives, min_size=5, max_size=30),
    asked=st.lists(objectives, min_size=1, max_size=4),
    slow=lives,
)
def test_what_is_remembered_of_peers_explains_a_breach_as_they_do(
    came: list[Lived], asked: list[LatencyLimit], slow: Lived
) -> None:
    assert breaches(slow, asked, [remembered(life) for life in came]) == breaches(slow, asked, came)


@pytest.mark.parametrize("num_gaps", [0, 1, 7])
def test_what_is_remembered_is_all_of_a_request_but_for_its_gaps(num_gaps: int) -> None:
    life = Lived({"queue": 3, "prefill_own": 1 << 40}, {"decode_own": 5 * MS}, num_gaps=num_gaps)
    kept = remembered(life)
    for name in PeerRecord.__struct_fields__[:-2]:
        assert getattr(kept, name) == getattr(life, name)
    assert kept.ledger_ns == life.ledger_ns
    assert kept.ttft_ledger_ns == life.ttft_ledger_ns
    assert kept.tbt_ns == life.tbt_ns[:1]


def test_compliant_peers_are_kept_until_newer_ones_replace_them() -> None:
    limit = LatencyLimit("ttft", 5 * MS)
    peers = Peers(most=3)
    met = [Lived({"queue": 4 * MS}, arrived_ns=at) for at in range(5)]
    for request in met:
        peers.append(request)
        peers.append(Lived({"queue": 6 * MS}))
        peers.append(Lived({"queue": 4 * MS}, joined_late=True))
        assert [peer.request for peer in peers.compliant(limit)] == [request]
        assert [peer.took.whole_ns for peer in peers.compliant(limit)] == [4 * MS]
    assert len(peers) == 3
