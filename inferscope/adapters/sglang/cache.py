"""Recorder of SGLang's radix cache: what leaves it, and what each prompt found.

The keys of prefixes are computed here, at every 32 tokens. The tree's core in Python names each
node that it evicts. Its default core is written in Rust, and its nodes cannot be read: there,
evictions are derived. What was put into the tree, and is not found, was evicted. The evictor is one
of the requests for whose batches room was made since then; the records say that it is inferred.

    checkpoint_into_tree               the prefix of a request that is in the tree now
    prepare_for_…, check_decode_mem    the batch for which room is made
    _evict                             how many tokens left the tree
    record_remove                      a node that leaves it; by the core in Python alone
    reset                              the tree is empty
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from inferscope.adapters.sglang.state import MARK, Followed
from inferscope.host_signals import pass_on
from inferscope.prefix import block_keys, first_key, packed
from inferscope.probe import CacheWatch, Probe

FEATURE = "cache forensics"
NODES = "evicted nodes of the radix cache"
_GRID = 32
"""Tokens that one key stands for, unless a page is larger."""
_TOKEN_BYTES = 8
_MOST_RUNNING = 4096
_TREE = "UnifiedRadixCache"


class CacheRecorder:
    """Recorder of one scheduler's radix cache; of its methods `arrived` does not raise."""

    def __init__(self, watch: CacheWatch, *, block_tokens: int, off: str) -> None:
        """Record by a watch.

        Args:
            watch: writes the records.
            block_tokens: tokens that a key stands for.
            off: reason why no prompt is looked up; empty if prompts are.
        """
        self._watch = watch
        self._block_tokens = block_tokens
        self._block_bytes = block_tokens * _TOKEN_BYTES
        self._off = off
        self._prefills: dict[int, list[int]] = {}
        """Block keys of requests whose prompts are not in the tree yet, by index."""
        self._running: dict[int, list[int]] = {}
        """Block keys of the prompts of running requests, by index."""
        self._num_chunked: dict[int, int] = {}
        """Number of blocks in the tree of each prompt that is computed in chunks, by index."""
        self._makes_room_for: Sequence[Any] = ()
        self._owners: tuple[int, ...] = ()
        """Indices of the requests for which room is being made."""
        self._nodes = NodeKeys(block_tokens)

    def arrived(self, request: Any, followed: Followed, hit: int) -> None:
        """Record what a request found at its first admission."""
        try:
            self._arrived(request, followed, hit)
        except Exception as error:
            self._watch.fail(error)

    def _arrived(self, request: Any, followed: Followed, hit: int) -> None:
        watch, since_ns = self._watch, self._watch.now()
        prompt = request.origin_input_ids
        num_tokens, off = len(prompt), self._off
        start = getattr(request, "logprob_start_len", -1)
        if not off and request.return_logprob and hit <= start < num_tokens - 1:
            off = "log probabilities of the prompt"
        if off:
            watch.not_asked(followed.index, num_tokens=num_tokens, hit=hit, reason=off)
            return
        keys = block_keys(_cells(prompt), self._block_bytes, first_key(_namespace(request)))
        watch.admitted(
            followed.index,
            num_tokens=num_tokens,
            hit=hit,
            keys=keys,
            raw_keys=packed(keys),
            pending=list(self._prefills.items()),
            remembers=False,
            since_ns=since_ns,
        )
        for table in (self._prefills, self._running):
            table[followed.index] = keys
            if len(table) > _MOST_RUNNING:  # they ended without a hook
                oldest = next(iter(table))
                table.pop(oldest, None)
                self._num_chunked.pop(oldest, None)

    def inserted(self, _: Any, /, req: Any, up_to: int, **__: Any) -> None:
        """Note that the first tokens of a request are in the tree."""
        followed = getattr(req, MARK, None)
        if followed is not None and not self._off:
            self._inserted(req, followed.index, up_to)

    def ended(self, index: int) -> None:
        """Drop what is kept of a request; of one that is aborted the chunks stay in the tree."""
        self._prefills.pop(index, None)
        keys, num = self._running.pop(index, []), self._num_chunked.pop(index, 0)
        if num:
            self._watch.stored(keys, num)

    def _inserted(self, request: Any, index: int, up_to: int) -> None:
        keys = self._running.get(index, [])
        is_finished, is_whole = request.finished(), up_to >= len(request.origin_input_ids)
        if is_finished:
            self._running.pop(index, None)
        if is_whole:
            self._prefills.pop(index, None)
        elif not is_finished and index in self._running:
            # It stays locked in the tree while the rest is computed: noted with that or at the end.
            self._num_chunked[index] = up_to // self._block_tokens
            return
        self._num_chunked.pop(index, None)
        num, done = up_to // self._block_tokens, len(keys)
        if num > done:  # with output tokens
            tokens = request.full_untruncated_fill_ids[done * self._block_tokens : up_to]
            last = keys[-1] if keys else first_key(_namespace(request))
            keys = keys + block_keys(_cells(tokens), self._block_bytes, last)
        self._watch.stored(keys, num)

    def preparing(self, batch: Any) -> None:
        """Note the batch for which room may be made from here on."""
        self._makes_room_for = batch.reqs

    def prepared(self) -> None:
        """Note that the batch has its room."""
        self._makes_room_for = ()

    def evicting(self) -> None:
        """Note that room is about to be made for the batch."""
        marks = [getattr(request, MARK, None) for request in self._makes_room_for]
        self._owners = tuple([followed.index for followed in marks if followed is not None])
        self._watch.make_room_for(*(self._owners or (-1,)))

    def removed(self, node: Any) -> None:
        """Note a node that is being evicted."""
        if not self._off:
            self._watch.evicted_blocks(self._nodes.of(node))

    def evicted(self, result: Any) -> None:
        """Note how many tokens left the tree; those in a batch share them."""
        num_tokens = result.num_tokens_evicted
        if num_tokens:
            self._watch.evicted_tokens(num_tokens, self._owners or (-1,))
        self._watch.make_room_for(-1)

    def cleared(self) -> None:
        """Note that the tree is empty."""
        self._prefills.clear()
        self._num_chunked.clear()
        self._nodes = NodeKeys(self._block_tokens)
        self._watch.cleared()

    def fail(self, error: Exception) -> None:
        """End the forensics: a hook has failed."""
        self._watch.fail(error)


class NodeKeys:
    """Keys of the blocks in the nodes of a tree whose core is written in Python.

    A key stands for all tokens before it too, which are those of the node's ancestors. The last
    path is kept, since a path is evicted leaf by leaf, and siblings have most of it in common. A
    split moves the beginning of a node, never its end.
    """

    def __init__(self, block_tokens: int) -> None:
        """Keep no path yet; a key stands for this number of tokens."""
        self._block_tokens = block_tokens
        self._cells = array("q")
        self._keys: list[int] = []
        self._end_by_node: dict[int, int] = {}
        """Number of tokens up to the end of each node of the path."""

    def of(self, node: Any) -> list[int]:
        """Return the keys of the whole blocks of which a node holds tokens."""
        if node.id not in self._end_by_node:
            self._read(node)
        end, width = self._end_by_node[node.id], self._block_tokens
        return self._keys[(end - len(node.key)) // width : end // width]

    def _read(self, leaf: Any) -> None:
        """Compute the keys of the path to a node, from its nearest ancestor on the last path."""
        path, node = [], leaf
        while node.parent is not None and node.id not in self._end_by_node:
            path.append(node)
            node = node.parent
        end = self._end_by_node.get(node.id, 0)
        self._end_by_node = {each: at for each, at in self._end_by_node.items() if at <= end}
        del self._cells[end:], self._keys[end // self._block_tokens :]
        for node in reversed(path):
            num, tokens = len(node.key), node.key.token_ids  # keys of pairs of tokens hold one more
            self._cells.extend(tokens if len(tokens) == num else tokens[:num])
            end += num
            self._end_by_node[node.id] = end
        last = self._keys[-1] if self._keys else first_key(_namespace(leaf.key))
        rest = self._cells[len(self._keys) * self._block_tokens :]
        self._keys += block_keys(rest, self._block_tokens * _TOKEN_BYTES, last)


class CacheHooks:
    """Hooks of the radix cache and of what makes room in it."""

    def __init__(self, run: Callable[..., Any]) -> None:
        """Observe nothing yet; `run` calls a hook and guards it."""
        self.recorder: CacheRecorder | None = None
        self._run = run
        self._tree_id = 0
        self._evicting: CacheRecorder | None = None
        """Recorder while its tree evicts."""

    def by_target(self, tree: str, batch: str) -> dict[str, Callable[..., Any]]:
        """Return the hooks by the dotted name of what they are placed around."""
        return {
            f"{tree}.checkpoint_into_tree": self._checkpoint,
            f"{tree}._evict": self._evict,
            f"{tree}.reset": self._reset,
            f"{batch}.prepare_for_extend": self._prepare,
            f"{batch}.prepare_for_decode": self._prepare,
            f"{batch}.check_decode_mem": self._prepare,
        }

    def of_nodes(self, events: str) -> dict[str, Callable[..., Any]]:
        """Return the hook of what a tree's core in Python calls with each evicted node."""
        return {f"{events}.record_remove": self._remove}

    def open(self, scheduler: Any, probe: Probe) -> CacheRecorder | None:
        """Observe a scheduler's cache; return its recorder, None if nothing is recorded."""
        tree = getattr(scheduler, "tree_cache", None)
        if tree is None:
            probe.unsupported(f"{FEATURE}: the scheduler has no tree_cache")
            return None
        try:
            return self._opened(scheduler, tree, probe)
        except Exception as error:
            pass_on(error)
            probe.unsupported(f"{FEATURE}: {type(error).__name__}: {error}")
            return None

    def _opened(self, scheduler: Any, tree: Any, probe: Probe) -> CacheRecorder | None:
        page = int(scheduler.page_size)
        block_tokens = page if page > _GRID or _GRID % page else _GRID
        watch = CacheWatch.open(
            probe,
            block_tokens=block_tokens,
            num_blocks=int(scheduler.max_total_num_tokens) // block_tokens,
            page_tokens=page,
            is_inferring=True,
        )
        if watch is None:
            return None
        self._tree_id = id(tree)
        self.recorder = CacheRecorder(watch, block_tokens=block_tokens, off=_reason_off(tree))
        return self.recorder

    def _of(self, tree: Any) -> CacheRecorder | None:
        return self.recorder if id(tree) == self._tree_id else None

    # A hook takes what SGLang passes, and reads it behind a guard: a method of another version
    # costs the forensics alone.

    def _checkpoint(self, original: Any, tree: Any, *args: Any, **kw: Any) -> Any:
        result = original(tree, *args, **kw)
        recorder = self._of(tree)
        if recorder is not None:
            self._run(_record, recorder, recorder.inserted, tree, *args, **kw)
        return result

    def _evict(self, original: Any, tree: Any, *args: Any, **kw: Any) -> Any:
        recorder = self._of(tree)
        if recorder is None:
            return original(tree, *args, **kw)
        self._run(_record, recorder, recorder.evicting)
        self._evicting = recorder
        try:
            result = original(tree, *args, **kw)
        finally:
            self._evicting = None
        self._run(_record, recorder, recorder.evicted, result)
        return result

    def _remove(self, original: Any, events: Any, node: Any, *args: Any, **kw: Any) -> Any:
        recorder = self._evicting
        if recorder is not None:
            self._run(_record, recorder, recorder.removed, node)
        return original(events, node, *args, **kw)

    def _reset(self, original: Any, tree: Any, *args: Any, **kw: Any) -> Any:
        result = original(tree, *args, **kw)
        recorder = self._of(tree)
        if recorder is not None:
            self._run(_record, recorder, recorder.cleared)
        return result

    def _prepare(self, original: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        recorder = self.recorder
        if recorder is None:
            return original(batch, *args, **kw)
        self._run(_record, recorder, recorder.preparing, batch)
        try:
            return original(batch, *args, **kw)
        finally:
            recorder.prepared()


def _record(recorder: CacheRecorder, hook: Callable[..., None], *args: Any, **kw: Any) -> None:
    """Call a hook of the recorder; a fault in it ends the forensics."""
    try:
        hook(*args, **kw)
    except Exception as error:
        recorder.fail(error)


def _reason_off(tree: Any) -> str:
    """Return why a tree's prompts are not looked up in a way that is recorded."""
    kind = type(tree).__name__
    if kind != _TREE:
        return f"the cache is a {kind}"
    if tree.disable:
        return "the prefix cache is disabled"
    if getattr(tree, "is_swa_enabled", False) or getattr(tree, "is_mamba_enabled", False):
        return "the model has several kinds of KV caches"
    if getattr(tree, "cache_controller", None) is not None:
        return "a hierarchical cache holds blocks too"
    return ""


def _namespace(owner: Any) -> object:
    """Return what keeps the prefixes of a request, or of a node's key, apart from others."""
    return getattr(owner, "extra_key", None), getattr(owner, "cache_salt", None) or None


def _cells(tokens: Sequence[int]) -> array[int]:
    return tokens if isinstance(tokens, array) else array("q", tokens)
