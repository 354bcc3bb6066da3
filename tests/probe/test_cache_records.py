from __future__ import annotations

from pathlib import Path
from typing import Any

from inferscope.probe import NO_REQUEST, Probe
from inferscope.records import (
    LOOKUP_CLASSES,
    LORA,
    CacheLookup,
    CacheSample,
    ProbeHealth,
    PromptLikeness,
    encode,
)
from tests.probe.fakes import FakeClock, make_probe, of


def path_of(probe: Probe) -> Path:
    assert probe.path is not None
    return probe.path


def test_a_cache_lookup_is_recorded_by_class_with_its_evictor(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock())
    first, second = (probe.queued(name, prompt_tokens=40) for name in "ab")
    tokens = {"hit": 16, "evicted": 16, "rounding": 8}
    probe.cache_lookup(second, tokens=tokens, evictor=first, evicted_ns=7)
    probe.cache_lookup(first, tokens={"off": 40}, off_reason="disabled")
    probe.cache_lookup(NO_REQUEST, tokens=tokens)
    probe.close()
    found, off = of(CacheLookup, path_of(probe))
    assert {name: getattr(found, name) for name in tokens} == tokens
    assert sum(getattr(found, name) for name in LOOKUP_CLASSES) == 40
    assert (found.index, found.evictor, found.evicted_ns, found.twin) == (second, first, 7, -1)
    assert (off.off, off.off_reason, off.evictor, off.evicted_ns) == (40, "disabled", -1, None)


def test_the_longest_spans_of_a_likeness_are_kept_within_96_bytes(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock())
    first, second = (probe.queued(name, prompt_tokens=2**20) for name in "ab")
    spans = [(at * 10_000, at * 10_000 + 100 + at) for at in range(1, 13)]
    probe.prompt_likeness(second, first, diverged_at=5, equal_again_at=9, shift=-4, spans=spans)
    huge = [(at << 28, (at << 28) + 100) for at in range(12)]
    probe.prompt_likeness(second, first, diverged_at=2**31, spans=huge, differs=LORA)
    probe.close()
    small, large = of(PromptLikeness, path_of(probe))
    assert small.spans == tuple(spans[-len(small.spans) :])
    assert len(small.spans) == 8
    assert 0 < len(large.spans) < 8
    assert all(len(encode(record)) <= 96 for record in (small, large))
    assert (small.earlier, small.equal_again_at, small.shift) == (first, 9, -4)
    assert large.differs == LORA


def test_a_cache_sample_is_recorded_and_refused_beyond_its_bound(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock())
    index = probe.queued("a", prompt_tokens=32_768)
    given: dict[str, Any] = {"block_tokens": 16, "num_blocks": 2048, "rate": 1 / 64}
    probe.cache_sample(index, digests=range(54), **given)
    probe.cache_sample(index, digests=range(55), **given)
    probe.cache_sample(index, digests=[], **{**given, "rate": 0})
    probe.close()
    (sample,) = of(CacheSample, path_of(probe))
    assert memoryview(sample.digests).cast("Q").tolist() == list(range(54))
    assert len(encode(sample)) <= 512
    assert of(ProbeHealth, path_of(probe))[-1].odd_values == 2


def test_the_frames_of_one_request_take_at_most_700_bytes(tmp_path: Path) -> None:
    clock = FakeClock()
    clock.now_ns = 2**62
    probe = make_probe(tmp_path, clock)
    index = probe.queued("a", prompt_tokens=32_768)
    ring = probe._log.ring
    assert ring is not None
    before = ring.bytes_since_keyframe
    tokens = {"hit": 2**14, "evicted": 2**14 - 31, "rule": 16, "rounding": 15}
    probe.cache_lookup(index, tokens=tokens, evictor=index, evicted_ns=2**62)
    spans = [(at, at + 99) for at in range(1000, 2**15, 3000)]
    probe.prompt_likeness(index, index, diverged_at=300, equal_again_at=999, spans=spans)
    digests = range(2**64 - 54, 2**64)
    probe.cache_sample(index, block_tokens=16, num_blocks=2047, rate=1 / 37, digests=digests)
    assert 600 < ring.bytes_since_keyframe - before <= 700


def test_what_the_caller_computed_counts_as_cost_of_the_probe(tmp_path: Path) -> None:
    clock = FakeClock()
    probe = make_probe(tmp_path, clock)
    index = probe.queued("a", prompt_tokens=10)
    before_ns = probe._log.cost_ns
    probe.cache_lookup(index, tokens={"hit": 10}, since_ns=clock.now_ns - 10_000_000)
    probe.cache_lookup(index, tokens={"hit": 10}, since_ns=clock.now_ns + 10_000_000)
    assert 10_000_000 <= probe._log.cost_ns - before_ns < 11_000_000
