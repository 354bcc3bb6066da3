"""What a radix cache lost, and what an admitted prompt found, through the hooks."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inferscope.adapters.sglang.cache import CacheHooks, CacheRecorder, NodeKeys
from inferscope.adapters.sglang.scheduler import SchedulerWatch
from inferscope.adapters.sglang.state import MARK, Followed
from inferscope.prefix import block_keys, first_key
from inferscope.records import LOOKUP_CLASSES, CacheLookup, ProbeHealth
from tests.adapters.sglang_objects import Abort, Req
from tests.probe.fakes import FakeClock, make_probe, of


class UnifiedRadixCache:
    """Counts what it is asked; what is in it, a test decides."""

    def __init__(self, *, disable: bool = False) -> None:
        self.disable = disable

    def checkpoint_into_tree(self, req: Any, *, up_to: int) -> None:
        """Insert."""

    def _evict(self, num_tokens: int) -> Any:
        return SimpleNamespace(num_tokens_evicted=num_tokens)

    def reset(self) -> None:
        """Clear."""


class Key:
    """Tokens of a node, and what keeps them apart from others."""

    def __init__(self, tokens: list[int], salt: str | None = None) -> None:
        self.token_ids = array("q", tokens)
        self.extra_key, self.cache_salt = None, salt

    def __len__(self) -> int:
        return len(self.token_ids)


class Node:
    """A node of a tree whose core is written in Python; the root has no key."""

    num_made = 0

    def __init__(self, parent: Node | None, tokens: list[int], salt: str | None = None) -> None:
        Node.num_made += 1
        self.id, self.parent = Node.num_made, parent
        self.key = Key(tokens, salt)


class KVCacheEventRecorder:
    """Recorder of events, which the core calls with each node, switched on or not."""

    def record_remove(self, node: Node, medium: str = "GPU") -> None:
        """Record nothing: it is off."""


class PythonTree(UnifiedRadixCache):
    """Names each node that it evicts, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves: list[Node] = []
        self.record_remove: Callable[[Node], object]

    def _evict(self, num_tokens: int) -> Any:
        num = 0
        while num < num_tokens:
            node = self.leaves.pop(0)
            self.record_remove(node)
            num += len(node.key)
        return SimpleNamespace(num_tokens_evicted=num)


PythonTree.__name__ = "UnifiedRadixCache"


class Seen:
    """A tree under the hooks, and requests that are admitted as a test asks."""

    def __init__(self, folder: Path, tree: Any = None, **scheduler: Any) -> None:
        self.probe = make_probe(folder, FakeClock(step_ns=10))
        self.tree = tree or UnifiedRadixCache()
        self.hooks = CacheHooks(lambda hook, *args, **kw: hook(*args, **kw))
        self.placed = self.hooks.by_target("tree", "batch") | self.hooks.of_nodes("events")
        self.tree.record_remove = partial(self.call, "record_remove", KVCacheEventRecorder())
        options = {"page_size": 1, "max_total_num_tokens": 20_000, "tree_cache": self.tree}
        self.recorder = self.hooks.open(SimpleNamespace(**{**options, **scheduler}), self.probe)
        self.left: deque[Any] = deque()

    @property
    def cache(self) -> CacheRecorder:
        assert self.recorder is not None
        return self.recorder

    def call(self, name: str, *args: Any, **kw: Any) -> Any:
        (target,) = (each for each in self.placed if each.endswith(name))
        original = getattr(type(args[0]), name)
        return self.placed[target](original, *args, **kw)

    def request(self, tokens: list[int], hit: int = 0, **more: Any) -> Any:
        prompt = array("q", tokens)
        made = SimpleNamespace(
            origin_input_ids=prompt,
            full_untruncated_fill_ids=prompt,
            return_logprob=False,
            finished=lambda: False,
            **more,
        )
        index = self.probe.queued("r", prompt_tokens=len(tokens))
        followed = Followed(index, self.left)
        setattr(made, MARK, followed)
        self.cache.arrived(made, followed, hit)
        return made

    def evict(self, num_tokens: int, *requests: Any, of: str = "prepare_for_extend") -> None:
        batch = SimpleNamespace(reqs=list(requests))
        prepare = self.placed[f"batch.{of}"]
        prepare(lambda batch: self.call("_evict", self.tree, num_tokens), batch)

    def lookups(self) -> list[CacheLookup]:
        assert self.probe.path is not None
        return of(CacheLookup, self.probe.path)

    def classes(self) -> list[dict[str, int]]:
        return [
            {name: num for name in LOOKUP_CLASSES if (num := getattr(lookup, name))}
            for lookup in self.lookups()
        ]


def index_of(request: Any) -> int:
    found = getattr(request, MARK)
    assert isinstance(found, Followed)
    return found.index


PROMPT = list(range(1000, 1100))


def test_what_was_in_the_tree_and_is_not_found_was_evicted(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    first = seen.request(PROMPT)
    seen.call("checkpoint_into_tree", seen.tree, first, up_to=100)
    second, third = seen.request([1] * 50), seen.request([2] * 50)
    seen.evict(10, second)
    seen.evict(70, third, second)
    seen.request(PROMPT, hit=20)
    assert seen.classes()[3] == {"hit": 20, "evicted": 76, "unmatched": 3, "rule": 1}
    lookup = seen.lookups()[3]
    assert lookup.is_inferred
    assert lookup.evictors == (index_of(second), index_of(third))
    assert (lookup.evictor, lookup.num_evictors) == (index_of(second), 2)


def stored(seen: Seen, tokens: list[int], *ends: int, salt: str | None = None) -> list[Node]:
    """Put a request's tokens into a tree, in nodes with these ends, and return them."""
    seen.call("checkpoint_into_tree", seen.tree, seen.request(tokens), up_to=len(tokens))
    nodes = [Node(None, [])]
    for start, end in pairwise((0, *ends)):
        nodes.append(Node(nodes[-1], tokens[start:end], salt))
    return nodes[1:]


def test_evicted_nodes_name_their_evictor_and_the_time(tmp_path: Path) -> None:
    seen = Seen(tmp_path, PythonTree())
    upper, lower = stored(seen, PROMPT, 50, 100)
    seen.tree.leaves = [lower, upper]
    second, third = seen.request([1] * 50), seen.request([2] * 50)
    seen.evict(50, second)
    between_ns = seen.probe.clock.monotonic_ns()
    seen.evict(50, third, of="check_decode_mem")
    seen.request(PROMPT, hit=50)
    seen.request(PROMPT)
    lookups, classes = seen.lookups()[3:], seen.classes()[3:]
    # The last 3 fill no 32: they are the comparison's.
    assert classes[0] == {"hit": 50, "evicted": 46, "unmatched": 3, "rule": 1}
    assert classes[1] == {"evicted": 96, "unmatched": 3, "rule": 1}
    assert [lookup.evictor for lookup in lookups] == [index_of(second), index_of(third)]
    assert 0 < (lookups[0].evicted_ns or 0) < between_ns < (lookups[1].evicted_ns or 0)
    assert not any(lookup.is_inferred or lookup.evictors for lookup in lookups)


def test_a_node_is_evicted_from_its_own_branch_alone(tmp_path: Path) -> None:
    seen = Seen(tmp_path, PythonTree())
    other = [*PROMPT[:40], *range(60)]
    nodes = stored(seen, PROMPT, 40, 100)
    stored(seen, other, 40, 100)
    seen.tree.leaves = nodes[1:]
    second = seen.request([1] * 50)
    seen.evict(60, second)
    seen.request(PROMPT, hit=40)
    seen.request(other, hit=99)
    assert seen.classes()[3:] == [
        {"hit": 40, "evicted": 56, "unmatched": 3, "rule": 1},
        {"hit": 99, "rule": 1},
    ]


def test_nodes_have_the_keys_of_their_paths_in_whatever_order_they_are_read() -> None:
    key = random.Random(4)
    nodes = [Node(None, [])]
    for _ in range(60):
        tokens = [key.randrange(9) for _ in range(key.randrange(1, 90))]
        nodes.append(Node(key.choice(nodes), tokens))
    kept = NodeKeys(32)
    for node in key.choices(nodes[1:], k=300):
        path, above = list(node.key.token_ids), node.parent
        while above is not None:
            path = [*above.key.token_ids, *path]
            above = above.parent
        keys = block_keys(array("q", path), 32 * 8, first_key((None, None)))
        assert kept.of(node) == keys[(len(path) - len(node.key)) // 32 :]


def test_a_node_that_is_split_after_its_path_was_read_keeps_its_keys(tmp_path: Path) -> None:
    seen = Seen(tmp_path, PythonTree())
    long = list(range(2000, 2320))
    root, upper, leaf = Node(None, []), *stored(seen, long, 160, 320)
    second = seen.request([1] * 50)
    seen.tree.leaves = [leaf]
    seen.evict(1, second)
    head = Node(root, long[:64])  # the split's new node; the upper one keeps its end
    upper.parent, upper.key = head, Key(long[64:160])
    seen.tree.leaves = [upper]
    seen.evict(1, second)
    seen.request(long, hit=64)
    assert seen.classes()[-1] == {"hit": 64, "evicted": 255, "rule": 1}
    seen.tree.leaves = [head]
    seen.evict(1, second)
    seen.request(long)
    assert seen.classes()[-1] == {"evicted": 319, "rule": 1}
    assert not seen.lookups()[-1].is_inferred


def test_a_node_for_a_batch_of_several_lists_them_as_inferred(tmp_path: Path) -> None:
    seen = Seen(tmp_path, PythonTree())
    seen.tree.leaves = stored(seen, PROMPT, 100)
    batch = [seen.request([number] * 50) for number in range(10)]
    seen.evict(1, *batch)
    seen.request(PROMPT)
    lookup = seen.lookups()[-1]
    assert lookup.is_inferred
    assert lookup.evictors == tuple(index_of(request) for request in batch[:8])
    assert (lookup.evictor, lookup.num_evictors) == (index_of(batch[0]), 10)


def test_a_node_of_another_tree_or_salt_evicts_nothing_of_this_prompt(tmp_path: Path) -> None:
    seen = Seen(tmp_path, PythonTree())
    (node,) = stored(seen, PROMPT, 100)
    seen.tree.record_remove(node)  # no eviction of this tree is under way
    seen.tree.leaves = [Node(node.parent, PROMPT, "one")]
    seen.evict(1, seen.request([1] * 50))
    seen.request(PROMPT, hit=50)
    assert seen.recorder is not None
    history = seen.recorder._watch.history
    assert history is not None
    assert history.num_ghosts == 3  # those of the salt
    # What was in the tree, and is not found, is derived, as for the core in Rust.
    assert seen.classes()[-1] == {"hit": 50, "evicted": 46, "unmatched": 3, "rule": 1}
    assert seen.lookups()[-1].is_inferred


def test_a_prompt_waits_for_one_that_is_not_in_the_tree_yet(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    first = seen.request(PROMPT)
    seen.request(PROMPT)
    seen.call("checkpoint_into_tree", seen.tree, first, up_to=64)
    seen.call("checkpoint_into_tree", seen.tree, first, up_to=100)
    assert seen.classes() == [
        {"unmatched": 99, "rule": 1},
        {"pending": 96, "unmatched": 3, "rule": 1},
    ]
    assert seen.lookups()[1].twin == index_of(first)


def test_a_next_turn_that_was_evicted_includes_the_output(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    first = seen.request(PROMPT)
    first.full_untruncated_fill_ids = array("q", [*PROMPT, *range(40)])
    first.finished = lambda: True
    seen.call("checkpoint_into_tree", seen.tree, first, up_to=140)
    seen.evict(140)
    seen.request([*PROMPT, *range(40), *[7] * 20])
    assert seen.classes()[1] == {"evicted": 128, "unmatched": 31, "rule": 1}


def test_nothing_is_evicted_while_the_tree_evicts_nothing(tmp_path: Path) -> None:
    """Whatever the reason why the tree does not have it: no room was made."""
    seen = Seen(tmp_path)
    seen.evict(70)
    seen.call("checkpoint_into_tree", seen.tree, seen.request(PROMPT), up_to=100)
    seen.request(PROMPT)
    assert seen.classes()[1] == {"unmatched": 99, "rule": 1}
    assert not seen.lookups()[1].is_inferred


@pytest.mark.parametrize("is_aborted", [False, True])
def test_chunks_of_a_prompt_are_in_the_tree_once_it_is_whole_or_aborted(
    tmp_path: Path, is_aborted: bool
) -> None:
    seen, prompt = Seen(tmp_path), list(range(100))
    first = seen.request(prompt)
    for up_to in (32, 64):
        seen.call("checkpoint_into_tree", seen.tree, first, up_to=up_to)
    if is_aborted:
        seen.cache.ended(index_of(first))
    else:
        seen.call("checkpoint_into_tree", seen.tree, first, up_to=100)
    seen.evict(100, seen.request([7] * 50))
    seen.request(prompt)
    lost = 64 if is_aborted else 96
    assert seen.classes()[-1] == {"evicted": lost, "unmatched": 99 - lost, "rule": 1}


def test_a_reset_tree_is_cleared(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    seen.call("checkpoint_into_tree", seen.tree, seen.request(PROMPT), up_to=100)
    seen.call("reset", seen.tree)
    seen.request(PROMPT)
    assert seen.classes()[1] == {"cleared": 96, "unmatched": 3, "rule": 1}


def test_another_salt_finds_nothing(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    first = seen.request(PROMPT, cache_salt="one")
    seen.call("checkpoint_into_tree", seen.tree, first, up_to=100)
    seen.request(PROMPT, cache_salt="two")
    assert seen.classes()[1] == {"unmatched": 99, "rule": 1}


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (UnifiedRadixCache(disable=True), "the prefix cache is disabled"),
        (SimpleNamespace(), "the cache is a SimpleNamespace"),
    ],
)
def test_a_cache_that_cannot_be_followed_is_off(tmp_path: Path, tree: Any, reason: str) -> None:
    seen = Seen(tmp_path, tree)
    seen.request(PROMPT)
    assert seen.classes() == [{"off": 100}]
    assert seen.lookups()[0].off_reason == reason


def test_log_probabilities_of_the_prompt_are_off(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    seen.request(PROMPT, logprob_start_len=0)
    made = seen.request(PROMPT, logprob_start_len=0)
    made.return_logprob = True
    seen.cache.arrived(made, getattr(made, MARK), 0)
    assert seen.classes()[-1] == {"off": 100}


def test_a_fault_costs_the_forensics_alone(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    followed = Followed(seen.probe.queued("r", prompt_tokens=1), seen.left)
    seen.cache.arrived(None, followed, 0)
    seen.call("_evict", seen.tree, 5)
    assert seen.probe.on
    seen.probe.close()
    (what,) = of(ProbeHealth, Path(str(seen.probe.path)))[-1].unsupported
    assert what.startswith("cache forensics: AttributeError")


def test_a_scheduler_without_a_tree_is_unsupported(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock())
    assert CacheHooks(lambda *_: None).open(SimpleNamespace(), probe) is None
    probe.close()
    (what,) = of(ProbeHealth, Path(str(probe.path)))[-1].unsupported
    assert what == "cache forensics: the scheduler has no tree_cache"


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_prompt_waits_for_no_prefill_that_was_aborted(tmp_path: Path, is_dropped: bool) -> None:
    seen = Seen(tmp_path)
    watch = SchedulerWatch(seen.probe, is_core=True)
    watch.cache = seen.cache
    aborted: Any = Req("aborted", 100, 5)
    aborted.return_logprob = False
    watch.enqueued(None, aborted)
    followed = getattr(aborted, MARK)
    seen.cache.arrived(aborted, followed, 0)
    del followed
    if is_dropped:  # its end is where no hook is
        del aborted
        watch.scheduled(0, None)
    else:
        watch.aborted(None, Abort({"type": "abort"}), aborted)
    seen.request(list(range(100)))
    assert seen.classes()[1] == {"unmatched": 99, "rule": 1}
    assert len(seen.cache._running) == 1


class OtherRadixCache(UnifiedRadixCache):
    """A cache of another version: it takes and returns other things."""

    def checkpoint_into_tree(self, up_to: Any) -> str:  # type: ignore[override]
        return "inserted"

    def _evict(self, num_tokens: int) -> int:
        return num_tokens


@pytest.mark.parametrize("method", ["checkpoint_into_tree", "_evict", "prepare_for_extend"])
def test_a_method_of_another_version_costs_the_forensics_and_not_the_engine(
    tmp_path: Path, method: str
) -> None:
    seen = Seen(tmp_path)
    tree = OtherRadixCache()
    seen.hooks._tree_id = id(tree)
    if method == "prepare_for_extend":
        assert seen.placed["batch.prepare_for_extend"](lambda batch: batch, 7) == 7
    else:
        assert seen.call(method, tree, 7) == ("inserted" if method != "_evict" else 7)
    assert seen.probe.on
    seen.probe.close()
    (what,) = of(ProbeHealth, Path(str(seen.probe.path)))[-1].unsupported
    assert what.startswith(("cache forensics: AttributeError", "cache forensics: TypeError"))


def test_a_tree_of_another_version_costs_the_forensics_alone(tmp_path: Path) -> None:
    tree = UnifiedRadixCache()
    del tree.disable
    seen = Seen(tmp_path, tree)
    assert seen.recorder is None
    seen.probe.close()
    (what,) = of(ProbeHealth, Path(str(seen.probe.path)))[-1].unsupported
    assert what.startswith("cache forensics: AttributeError")
