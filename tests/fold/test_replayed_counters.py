"""Counters of a run with a sampler, which are the same live, recorded and in any order."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from inferscope.fold.fold import Collector
from inferscope.fold.join.request_counters import RequestCounters
from inferscope.readers.source import RecordingSource, RingSource
from tests.cli.running import inferscope
from tests.fold.refolding import fold_again, folded_from
from tests.fold.scripts import MS, START_NS, Finals
from tests.fold.trains import Train, counters_of
from tests.fold.walls import Wall

UNTIL_MS = 7000
JUMPS = [(START_NS + 1500 * MS + 77, 40 * MS), (START_NS + 3333 * MS, -25 * MS)]


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write an engine's ring and a sampler's: short windows, and long ones for a regression."""
    train = Train().alternate(until_ms=UNTIL_MS, prefill_ms=20.3, decode_ms=6.4, gap_ms=1.1)
    train.sample(0.5, "sm_active_share", (0.9, 0.35), source="pm")
    train.stamp(Wall(3e-5, JUMPS), error_ns=900)
    train.sample(100, "energy_uj", (600e3, 350e3), source="nvml", is_share=False, idle=90e3)
    return train.write(tmp_path_factory.mktemp("rings"))


def counters_by_request(finals: Finals) -> list[tuple[str, RequestCounters]]:
    return [(final.request_id, final.counters) for final in finals.requests]


def totals_of(collector: Collector) -> bytes:
    counters = counters_of(collector)
    counts = (counters.num_unplaced, counters.found.num_late, counters.found.num_doubled)
    columns = (counters.totals, counters.covered_totals, counters.blurred)
    return msgspec.json.encode(
        [counts, *counters.idle_uj.values(), *(each.tolist() for each in columns)]
    )


@pytest.mark.thorough
def test_counters_are_the_same_however_the_rings_are_read(
    rings: list[Path], tmp_path: Path
) -> None:
    whole, expected = Finals(), None
    source = RingSource(lambda: rings, name="offline", sinks=(whole,))
    while not source.has_ended:
        source.advance()
    source.close()
    digests, expected = {source.collector.digest()}, totals_of(source.collector)
    measured = [one for _, one in counters_by_request(whole) if "sm_active_ns" in one.provenance]
    assert {one.provenance["sm_active_ns"].source for one in measured} == {"pm"}
    assert len(measured) > 0.85 * len(whole.requests)
    assert any("energy_uj" in one.provenance for one in measured)
    assert counters_of(source.collector).num_unplaced > 100
    folded = folded_from(rings)
    for seed in range(2):
        live, again = Finals(), Finals()
        folder, most_bytes = tmp_path / str(seed), (1 << 24, 20_000)[seed]
        digest, file = fold_again(
            rings, folded, folder, random.Random(seed), live, most_bytes=most_bytes
        )
        replay = RecordingSource(file, sinks=(again,))
        replay.advance()
        replay.close()
        digests |= {digest, replay.collector.digest()}
        assert counters_by_request(live) == counters_by_request(again) == counters_by_request(whole)
        assert totals_of(replay.collector) == expected
    assert len(digests) == 1
    done = inferscope("replay", str(file), "--check", rings=tmp_path)
    assert {done.stdout.strip()} == digests


@pytest.mark.thorough
def test_without_the_samplers_ring_the_numbers_are_others_but_the_time_is_the_same(
    rings: list[Path], tmp_path: Path
) -> None:
    folded, finals = folded_from(rings), (Finals(), Finals())
    both, _ = fold_again(rings, folded, tmp_path / "both", random.Random(1), finals[0])
    alone = [one for one in folded if one[1] == 0]
    one, _ = fold_again(rings[:1], alone, tmp_path / "one", random.Random(1), finals[1])
    assert one != both
    assert {final.counters.provenance.get("sm_active_ns") for final in finals[1].requests} == {None}
    for with_it, without in zip(finals[0].requests, finals[1].requests, strict=True):
        assert with_it.request_id == without.request_id
        assert with_it.ledger_ns == without.ledger_ns
        assert (with_it.prefill_ns, with_it.decode_ns) == (without.prefill_ns, without.decode_ns)
