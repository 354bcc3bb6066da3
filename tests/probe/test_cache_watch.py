"""The watch of a cache and the comparison of prompts, as an engine calls them."""

from __future__ import annotations

import hashlib
import os
import random
import struct
from array import array
from pathlib import Path
from typing import Any

import pytest

from inferscope.prefix import PromptHistory
from inferscope.probe import CacheWatch, Probe
from inferscope.records import (
    LOOKUP_CLASSES,
    SALT,
    CacheLookup,
    CacheSample,
    ProbeHealth,
    PromptLikeness,
)
from tests.probe.fakes import FakeClock, make_probe, of

WIDTH = 16
SWITCH = "INFERSCOPE_PREFIX_CACHE"


def path_of(probe: Probe) -> Path:
    assert probe.path is not None
    return probe.path


def watch_of(probe: Probe, **options: Any) -> CacheWatch:
    watch = CacheWatch.open(probe, **{"block_tokens": WIDTH, "num_blocks": 100, **options})
    assert watch is not None
    return watch


def hashes_of(tokens: list[int], salt: str = "") -> list[bytes]:
    """Return an engine's public hashes of a prompt's blocks."""
    found, last = [], salt.encode()
    for at in range(0, len(tokens) - WIDTH + 1, WIDTH):
        last = hashlib.sha256(last + array("I", tokens[at : at + WIDTH]).tobytes()).digest()
        found.append(last)
    return found


def test_nothing_of_a_prompt_but_positions_and_keyed_digests_is_in_the_ring(tmp_path: Path) -> None:
    key = random.Random(5)
    probe = make_probe(tmp_path, FakeClock(step_ns=1000), capacity=1 << 20)
    watch = watch_of(probe)
    salt = "canary-salt-9c1f"
    tokens = [key.randrange(100_000, 2**31) for _ in range(40 * WIDTH)]
    hashes = hashes_of(tokens, salt)
    for number in range(3):
        index = probe.queued(f"r{number}", prompt_tokens=len(tokens))
        probe.compare_prompt(index, tokens, salt=salt if number < 2 else None, adapter="canary")
        watch.admitted(
            index,
            num_tokens=len(tokens),
            hit=0,
            keys=hashes,
            raw_keys=b"".join(hashes),
            pending=[(0, hashes)] if number == 1 else [],
        )
        watch.make_room_for(index)
        for each in reversed(hashes):
            watch.evicted_blocks([each])
    probe.close()
    written = path_of(probe).read_bytes().rstrip(b"\0")
    lookups = of(CacheLookup, path_of(probe))
    assert [lookup.evicted for lookup in lookups] == [0, 39 * WIDTH, 39 * WIDTH]
    assert [record.differs for record in of(PromptLikeness, path_of(probe))] == [0, SALT]
    assert sum(len(sample.digests) for sample in of(CacheSample, path_of(probe))) == 3 * 39 * 8
    assert salt.encode() not in written
    for token in tokens:
        for form in ("<I", ">I"):  # that of columns and that of msgpack
            assert struct.pack(form, token) not in written
    for each in hashes:
        assert each[:6] not in written
        assert struct.pack("<q", hash(each))[:6] not in written


def test_digests_of_two_processes_have_nothing_in_common(tmp_path: Path) -> None:
    hashes = hashes_of(list(range(40 * WIDTH)))
    found = []
    for name in ("one", "two"):
        probe = make_probe(tmp_path, FakeClock(), name=name)
        index = probe.queued("r", prompt_tokens=640)
        raw = b"".join(hashes)
        watch_of(probe).admitted(index, num_tokens=640, hit=0, keys=hashes, raw_keys=raw)
        probe.close()
        (sample,) = of(CacheSample, path_of(probe))
        found.append(set(memoryview(sample.digests).cast("Q").tolist()))
    assert len(found[0]) == len(found[1]) == 39
    assert not found[0] & found[1]


@pytest.mark.parametrize(
    ("mode", "num_lookups", "num_compared"),
    [("", 1, 1), ("tokens", 1, 1), ("blocks", 1, 0), ("off", 0, 0), ("on", 0, 0)],
)
def test_the_switch_says_what_is_recorded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    num_lookups: int,
    num_compared: int,
) -> None:
    monkeypatch.setenv(SWITCH, mode)
    probe = make_probe(tmp_path, FakeClock())
    prompt = list(range(100))
    for name in "ab":
        index = probe.queued(name, prompt_tokens=100)
        probe.compare_prompt(index, prompt)
    watch = CacheWatch.open(probe, block_tokens=WIDTH, num_blocks=10)
    assert (watch is not None) == bool(num_lookups)
    if watch is not None:
        watch.not_asked(index, num_tokens=100, reason="a test")
    probe.close()
    assert len(of(CacheLookup, path_of(probe))) == num_lookups
    assert len(of(PromptLikeness, path_of(probe))) == num_compared


def test_a_fault_ends_the_forensics_once_and_nothing_else(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock())
    index = probe.queued("a", prompt_tokens=20)
    watch = watch_of(probe)
    watch.admitted(index, num_tokens=20, hit="none", keys=["k"], raw_keys=b"8 bytes.")  # type: ignore[arg-type]
    watch.evicted_blocks([[]])  # type: ignore[list-item]
    watch.cleared()
    watch.not_asked(index, num_tokens=20, reason="off")
    assert watch.history is None
    assert probe.on
    probe.close()
    (reason,) = of(ProbeHealth, path_of(probe))[-1].unsupported
    assert reason.startswith("cache forensics: TypeError")
    assert not of(CacheLookup, path_of(probe))


def test_a_prompt_that_cannot_be_compared_costs_its_own_comparison(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock())
    first, second, third = (probe.queued(name, prompt_tokens=100) for name in "abc")
    probe.compare_prompt(first, list(range(100)))
    for odd in (None, 5, ["text"], [-1], [2**40], [[1]]):
        probe.compare_prompt(second, odd)  # type: ignore[arg-type]
    probe.compare_prompt(second, list(range(100)), salt=[])
    probe.compare_prompt(third, list(range(100)))
    probe.close()
    (likeness,) = of(PromptLikeness, path_of(probe))
    assert (likeness.index, likeness.earlier, likeness.diverged_at) == (third, first, 100)
    assert of(ProbeHealth, path_of(probe))[-1].odd_values == 7


def test_a_probe_over_its_budget_leaves_the_forensics_out(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock())
    watch, prompt = watch_of(probe), list(range(100))
    for _ in range(3):
        index = probe.queued("r", prompt_tokens=100)
        probe.compare_prompt(index, prompt)
        watch.admitted(index, num_tokens=100, hit=0, keys=[], raw_keys=b"")
        probe._life.writes_plans = index != 0  # after the first
    probe.close()
    assert [lookup.index for lookup in of(CacheLookup, path_of(probe))] == [0, 2]
    assert [like.index for like in of(PromptLikeness, path_of(probe))] == [2]


def test_a_watch_of_a_disabled_probe_is_none() -> None:
    assert CacheWatch.open(Probe.disabled(), block_tokens=WIDTH, num_blocks=10) is None


def test_classes_sum_to_the_prompt_for_any_numbers(tmp_path: Path) -> None:
    key = random.Random(2)
    probe = make_probe(tmp_path, FakeClock(step_ns=10), capacity=1 << 20)
    watch = watch_of(probe, page_tokens=1, is_inferring=True)
    keys = [os.urandom(8) for _ in range(20)]
    sizes = []
    for _ in range(200):
        num_tokens = key.randrange(400)
        sizes.append(num_tokens)
        mine = [key.choice(keys) for _ in range(num_tokens // WIDTH)]
        index = probe.queued("r", prompt_tokens=num_tokens)
        watch.make_room_for(key.randrange(index + 1))
        if key.random() < 0.3:
            watch.evicted_blocks([key.choice(keys)])
            watch.evicted_tokens(9)
        if key.random() < 0.03:
            watch.cleared(keys)
        hit = key.randrange(num_tokens + 1)
        raw = b"".join(mine)
        pending = [(3, [key.choice(keys) for _ in range(5)])]
        watch.admitted(
            index, num_tokens=num_tokens, hit=hit, keys=mine, raw_keys=raw, pending=pending
        )
    probe.close()
    lookups = of(CacheLookup, path_of(probe))
    assert [sum(getattr(one, name) for name in LOOKUP_CLASSES) for one in lookups] == sizes
    assert watch.history is not None


def test_a_reset_while_the_probe_is_off_is_known_afterwards(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock(step_ns=10))
    watch = watch_of(probe)
    keys = [os.urandom(8) for _ in range(2)]
    probe._life.on = False
    watch.cleared(keys)
    probe._life.on = True
    index = probe.queued("r", prompt_tokens=2 * WIDTH + 1)
    watch.admitted(index, num_tokens=2 * WIDTH + 1, hit=0, keys=keys, raw_keys=b"".join(keys))
    probe.close()
    assert of(CacheLookup, path_of(probe))[0].cleared == 2 * WIDTH


def test_a_fault_of_the_comparison_costs_the_comparison_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise KeyError("a token")

    probe = make_probe(tmp_path, FakeClock(step_ns=10))
    index = probe.queued("r", prompt_tokens=9)
    monkeypatch.setattr(PromptHistory, "compare", broken)
    for _ in range(2):
        probe.compare_prompt(index, list(range(9)))
    assert probe.on
    probe.close()
    assert of(ProbeHealth, path_of(probe))[-1].unsupported == ("comparison of prompts: KeyError",)
