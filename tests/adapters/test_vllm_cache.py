"""What vLLM's pool evicts, and what an admitted prompt found, through the hooks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inferscope.adapters.patching import Patches
from inferscope.adapters.vllm.cache import CacheHooks, CacheRecorder
from inferscope.probe import Probe
from inferscope.records import LOOKUP_CLASSES, CacheLookup, ProbeHealth
from tests.adapters.toy_vllm import BLOCK, BlockPool, KVCacheManager
from tests.probe.fakes import FakeClock, make_probe, of

GROUP = bytes(4)


def hash_of(letter: str) -> bytes:
    return letter.encode() * 32


class Observed:
    """A pool under the hooks, and a scheduler that admits what a test asks."""

    def __init__(self, folder: Path, **manager: Any) -> None:
        self.probe = make_probe(folder, FakeClock(step_ns=10))
        self.pool = BlockPool(101, lambda: 100)
        self.manager = KVCacheManager(self.pool)
        self.manager.enable_caching = True
        for name, value in manager.items():
            setattr(self.manager, name, value)
        spec = SimpleNamespace(block_size=BLOCK)
        self.scheduler = SimpleNamespace(
            kv_cache_manager=self.manager,
            connector=None,
            kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]),
        )
        self.patches = Patches("toy")
        self.requests: dict[str, Any] = {}

    def install(self) -> CacheRecorder | None:
        self.patches.attach(self.probe)
        return CacheHooks().install(self.patches, self.scheduler, self.probe)

    def request(self, name: str, hashes: list[bytes], *, computed: int = 0) -> Any:
        num = len(hashes) * BLOCK + 1
        made = self.requests[name] = SimpleNamespace(
            request_id=name,
            index=self.probe.queued(name, prompt_tokens=num),
            num_prompt_tokens=num,
            block_hashes=hashes,
            num_computed_tokens=computed,
        )
        return made

    def index_of(self, name: str) -> int | None:
        return self.requests[name].index if name in self.requests else None

    def evict(self, key: bytes, block_id: int) -> None:
        self.pool.cached_block_hash_to_block[key + GROUP] = object()
        block = SimpleNamespace(block_hash=key + GROUP, block_id=block_id)
        assert self.pool._maybe_evict_cached_block(block)

    def lookups(self) -> list[CacheLookup]:
        assert self.probe.path is not None
        return of(CacheLookup, self.probe.path)


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Observed]:
    observed = Observed(tmp_path)
    yield observed
    observed.patches.restore()


def classes(lookup: CacheLookup) -> dict[str, int]:
    return {name: num for name in LOOKUP_CLASSES if (num := getattr(lookup, name))}


def step(new: dict[str, list[int]], cached: dict[str, list[int] | None]) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,)) for name, blocks in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            new_block_ids=[None if blocks is None else (blocks,) for blocks in cached.values()],
        ),
    )


def test_the_evictor_is_the_request_that_has_the_block_now(seen: Observed) -> None:
    recorder = seen.install()
    assert recorder is not None
    one, two = seen.request("one", [hash_of("x")]), seen.request("two", [hash_of("y")])
    seen.evict(hash_of("c"), 3)
    seen.evict(hash_of("b"), 7)
    seen.evict(hash_of("a"), 8)
    recorder.planned(step({"one": [1, 3]}, {"two": [7], "three": None}), seen.index_of)
    third = seen.request("third", [hash_of("a"), hash_of("b"), hash_of("c"), hash_of("d")])
    recorder.arrived(third, third.index, BLOCK, seen.requests)
    again = seen.request("again", [hash_of("a"), hash_of("b"), hash_of("c"), hash_of("d")])
    recorder.arrived(again, again.index, 2 * BLOCK, seen.requests)
    first, second = seen.lookups()
    assert classes(first) == {"hit": 4, "evicted": 8, "unmatched": 4, "rounding": 1}
    assert (first.evictor, second.evictor) == (two.index, one.index)
    missing = seen.request("fourth", [hash_of("a")])
    recorder.arrived(missing, missing.index, 0, seen.requests)
    assert (seen.lookups()[-1].evicted, seen.lookups()[-1].evictor) == (4, -1)


def test_a_prompt_waits_for_a_prefill_only_while_that_goes_on(seen: Observed) -> None:
    recorder = seen.install()
    assert recorder is not None
    hashes = [hash_of("a"), hash_of("b"), hash_of("c")]
    first = seen.request("first", hashes, computed=BLOCK)
    recorder.arrived(first, first.index, 0, seen.requests)
    second = seen.request("second", hashes, computed=BLOCK)
    recorder.arrived(second, second.index, BLOCK, seen.requests)
    first.num_computed_tokens = first.num_prompt_tokens
    del seen.requests["second"]
    third = seen.request("third", hashes, computed=BLOCK)
    recorder.arrived(third, third.index, BLOCK, seen.requests)
    found = seen.lookups()
    assert [classes(lookup) for lookup in found] == [
        {"unmatched": 12, "rounding": 1},
        {"hit": 4, "pending": 8, "rounding": 1},
        {"hit": 4, "unmatched": 8, "rounding": 1},
    ]
    assert [lookup.twin for lookup in found] == [-1, first.index, -1]


def test_blocks_of_a_reset_pool_are_cleared(seen: Observed) -> None:
    recorder = seen.install()
    assert recorder is not None
    for key in (hash_of("a"), hash_of("b")):
        seen.pool.cached_block_hash_to_block[key + GROUP] = object()
    assert seen.pool.reset_prefix_cache()
    request = seen.request("r", [hash_of("a"), hash_of("b"), hash_of("c")])
    recorder.arrived(request, request.index, 0, seen.requests)
    assert classes(seen.lookups()[0]) == {"cleared": 8, "unmatched": 4, "rounding": 1}


@pytest.mark.parametrize(
    ("manager", "reason"),
    [
        ({"enable_caching": False}, "the prefix cache is disabled"),
        ({"num_kv_cache_groups": 2}, "the model has 2 groups of KV caches"),
    ],
)
def test_what_cannot_be_looked_up_is_off_with_the_reason(
    tmp_path: Path, manager: dict[str, Any], reason: str
) -> None:
    seen = Observed(tmp_path, **manager)
    recorder = seen.install()
    assert recorder is not None
    request = seen.request("r", [hash_of("a")])
    recorder.arrived(request, request.index, 0, seen.requests)
    seen.patches.restore()
    (lookup,) = seen.lookups()
    assert (classes(lookup), lookup.off_reason) == ({"off": 5}, reason)


def test_a_request_that_skips_the_cache_is_off(seen: Observed) -> None:
    recorder = seen.install()
    assert recorder is not None
    request = seen.request("r", [hash_of("a")])
    request.skip_reading_prefix_cache = True
    recorder.arrived(request, request.index, 0, seen.requests)
    assert classes(seen.lookups()[0]) == {"off": 5}


def test_a_pool_without_the_methods_costs_the_forensics_alone(tmp_path: Path) -> None:
    seen = Observed(tmp_path)
    seen.manager.block_pool = SimpleNamespace(hash_block_size=BLOCK)  # type: ignore[assignment]
    assert seen.install() is None
    assert not seen.patches.is_off
    seen.probe.close()
    assert seen.probe.path is not None
    (what,) = of(ProbeHealth, seen.probe.path)[-1].unsupported
    assert what.startswith("cache forensics: ")


def test_a_fault_of_the_forensics_leaves_the_hooks_on(seen: Observed) -> None:
    recorder = seen.install()
    assert recorder is not None
    seen.evict(hash_of("a"), 1)
    recorder.planned(None, seen.index_of)
    recorder.arrived(None, 0, 0, {})
    assert not seen.patches.is_off
    assert seen.probe.on
    seen.probe.close()
    (what,) = of(ProbeHealth, Path(str(seen.probe.path)))[-1].unsupported
    assert what.startswith("cache forensics: AttributeError")


def test_a_disabled_probe_needs_no_recorder(tmp_path: Path) -> None:
    seen = Observed(tmp_path)
    assert CacheHooks().install(seen.patches, seen.scheduler, Probe.disabled()) is None
    seen.patches.restore()


class OtherPool(BlockPool):
    """A pool of another version: its blocks have neither hash nor number."""

    def _maybe_evict_cached_block(self, block: Any, *, reason: str = "") -> bool:
        return bool(reason)


def test_an_eviction_of_another_version_costs_the_forensics_and_not_the_engine(
    tmp_path: Path,
) -> None:
    seen = Observed(tmp_path)
    seen.manager.block_pool = pool = OtherPool(101, lambda: 100)
    assert seen.install() is not None
    assert pool._maybe_evict_cached_block(object(), reason="room") is True
    assert pool._maybe_evict_cached_block(object()) is False
    assert not seen.patches.is_off
    seen.patches.restore()
    seen.probe.close()
    (what,) = of(ProbeHealth, Path(str(seen.probe.path)))[-1].unsupported
    assert what.startswith("cache forensics: AttributeError")


def test_a_pool_of_another_version_costs_the_forensics_alone(seen: Observed) -> None:
    del seen.pool.hash_block_size
    assert seen.patches.run(seen.install) is None
    assert not seen.patches.is_off
    seen.probe.close()
    (what,) = of(ProbeHealth, Path(str(seen.probe.path)))[-1].unsupported
    assert what.startswith("cache forensics: AttributeError")


def test_blocks_may_be_evicted_while_an_overdue_plan_is_recorded(seen: Observed) -> None:
    recorder = seen.install()
    assert recorder is not None
    seen.request("one", [hash_of("x")])
    seen.evict(hash_of("a"), 1)

    read_by_hook = recorder.evicted

    def index_of(name: str) -> int | None:  # the engine's thread goes on, beside the probe's
        read_by_hook.append((hash_of("b") + GROUP, 2))
        return seen.index_of(name)

    recorder.planned(step({"one": [1]}, {}), index_of)
    recorder.planned(step({"one": [2]}, {}), seen.index_of)
    request = seen.request("r", [hash_of("a"), hash_of("b")])
    recorder.arrived(request, request.index, 0, seen.requests)
    assert classes(seen.lookups()[0]) == {"evicted": 8, "rounding": 1}


def test_the_block_that_eagle_computes_again_is_a_rule_and_not_evicted(seen: Observed) -> None:
    seen.scheduler.use_eagle_block_drop = True
    recorder = seen.install()
    assert recorder is not None
    hashes = [hash_of("a"), hash_of("b"), hash_of("c")]
    seen.request("one", [])
    seen.evict(hash_of("b"), 1)  # and cached again since then
    seen.evict(hash_of("c"), 2)
    recorder.planned(step({"one": [1, 2]}, {}), seen.index_of)
    whole = seen.request("whole", hashes)
    recorder.arrived(whole, whole.index, 2 * BLOCK, seen.requests)
    half = seen.request("half", [*hashes, hash_of("d")])
    recorder.arrived(half, half.index, BLOCK, seen.requests)
    assert [classes(lookup) for lookup in seen.lookups()] == [
        {"hit": 8, "rule": 4, "rounding": 1},
        {"hit": 4, "evicted": 4, "unmatched": 4, "rule": 4, "rounding": 1},
    ]
