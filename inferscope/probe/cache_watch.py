"""Watch of one prefix cache, called by an engine's core: evictions, resets and admissions.

    watch = CacheWatch.open(probe, block_tokens=16, num_blocks=4096)
    watch.make_room_for(index); watch.evicted_blocks(keys)    # while blocks are allocated
    watch.admitted(index, num_tokens=100, hit=48, keys=keys, raw_keys=packed(keys))

`inferscope.prefix` does the work. A fault in it ends the forensics, once, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from inferscope.host_signals import pass_on
from inferscope.probe.cache_records import asked_mode
from inferscope.probe.probe import Probe
from inferscope.records import RequestIndex

if TYPE_CHECKING:
    from inferscope.prefix import BlockHistory, BlockSampler, Outcome

FEATURE = "cache forensics"


class CacheWatch:
    """Watch of the prefix cache of one engine core; called on its thread, nothing here raises.

    Attributes:
        history: what happened to the blocks; None once the watch is off.
        now: the clock.
    """

    def __init__(self, probe: Probe, history: BlockHistory, sampler: BlockSampler) -> None:
        """Prefer `CacheWatch.open`."""
        self.history: BlockHistory | None = history
        self._probe = probe
        self._sampler = sampler
        self.now = probe.clock.monotonic_ns

    @classmethod
    def open(
        cls,
        probe: Probe,
        *,
        block_tokens: int,
        num_blocks: int,
        page_tokens: int | None = None,
        is_inferring: bool = False,
    ) -> CacheWatch | None:
        """Watch a cache; return None if the probe is off or INFERSCOPE_PREFIX_CACHE says so.

        Args:
            probe: writes the records.
            block_tokens: tokens that one block key stands for.
            num_blocks: blocks of that many tokens that the cache holds.
            page_tokens: tokens that the engine caches at a time, if that differs.
            is_inferring: whether some evictions cannot be seen and have to be derived.
        """
        if probe.path is None or asked_mode() == "off":
            return None
        try:
            from inferscope.prefix import BlockHistory, BlockSampler

            history = BlockHistory(
                block_tokens,
                page_tokens=page_tokens,
                is_inferring=is_inferring,
                now=probe.clock.monotonic_ns,
            )
            return cls(probe, history, BlockSampler(num_blocks))
        except Exception as error:
            pass_on(error)
            probe.unsupported(f"{FEATURE}: {type(error).__name__}: {error}")
            return None

    def make_room_for(self, index: RequestIndex | int, *others: RequestIndex | int) -> None:
        """Note the request, or several, for which blocks are evicted from here on; -1 for none."""
        if self.history is not None:
            self.history.make_room_for(index, *others)

    def evicted_blocks(self, keys: Sequence[Hashable]) -> None:
        """Note that cached blocks were evicted."""
        history = self.history
        if history is not None:
            try:
                history.evicted_blocks(keys)
            except Exception as error:
                self.fail(error)

    def evicted_tokens(self, num_tokens: int, evictors: tuple[int, ...] | None = None) -> None:
        """Note that cached tokens were evicted whose blocks cannot be seen.

        Args:
            num_tokens: number of the tokens.
            evictors: the requests that share their room; None for that of `make_room_for`.
        """
        self._guard(lambda history: history.evicted_tokens(num_tokens, evictors))

    def cleared(self, keys: Iterable[Hashable] = ()) -> None:
        """Note that the cache was reset, and these blocks were in it; also while switched off.

        Without it, prompts that are recorded later would miss these blocks for another reason.
        """
        history = self.history
        if history is not None:
            try:
                history.cleared(keys)
            except Exception as error:
                self.fail(error)

    def stored(self, keys: Sequence[Hashable], num: int | None = None) -> None:
        """Note that the first blocks of a prompt are in the cache, where evictions are derived.

        Args:
            keys: key of each block of the prompt.
            num: number of the blocks; None for all.
        """
        self._guard(lambda history: history.remember(keys, num))

    def admitted(
        self,
        index: RequestIndex,
        *,
        num_tokens: int,
        hit: int,
        keys: Sequence[Hashable],
        raw_keys: bytes,
        pending: Iterable[tuple[int, Sequence[Hashable]]] = (),
        num_reusable: int | None = None,
        num_dropped: int = 0,
        remembers: bool = True,
        since_ns: int | None = None,
    ) -> None:
        """Record the outcome of a request's first lookup, and a sample of its blocks.

        Args:
            index: the request.
            num_tokens: tokens of its prompt.
            hit: tokens of it that come from the cache.
            keys: key of each whole block, in order.
            raw_keys: the same keys one after another, of equal length.
            pending: requests admitted before it whose prompts are not computed yet, with the keys
                of their blocks.
            num_reusable: most tokens that the engine takes from its cache, if that is not the whole
                pages before the last token.
            num_dropped: tokens behind a hit that it found too, and computes again.
            remembers: whether its blocks are taken to be in the cache from here on, where evictions
                are derived; without it `stored` says so.
            since_ns: when the caller began to compute this.

        Over its budget, the probe leaves these records out.
        """
        if self._probe.is_shedding:
            return

        def write(history: BlockHistory) -> None:
            begun_ns = self.now() if since_ns is None else since_ns
            outcome = history.account(
                num_tokens,
                hit,
                keys,
                pending=pending,
                num_reusable=num_reusable,
                num_dropped=num_dropped,
            )
            if remembers:
                history.remember(keys)
            self._write(index, outcome, begun_ns)
            begun_ns = self.now()
            num_reached = num_tokens - outcome.rule - outcome.rounding
            num_blocks = min(len(keys), num_reached // history.block_tokens)
            raw = raw_keys[: num_blocks * len(raw_keys) // len(keys)] if num_blocks else b""
            sample = self._sampler.sample(raw, num_blocks)
            self._probe.cache_sample(
                index,
                block_tokens=history.block_tokens,
                num_blocks=sample.num_blocks,
                rate=sample.rate,
                digests=sample.digests,
                since_ns=begun_ns,
            )

        self._guard(write)

    def not_asked(self, index: RequestIndex, *, num_tokens: int, hit: int = 0, reason: str) -> None:
        """Record that a request's prompt was not looked up, with the reason."""

        def write(history: BlockHistory) -> None:
            self._write(index, history.not_asked(num_tokens, hit, reason), None)

        self._guard(write)

    def fail(self, error: Exception) -> None:
        """End the forensics and report it once.

        Raises:
            Exception: the same one, if a signal handler of the host raised it.
        """
        pass_on(error)
        if self.history is not None:
            self.history = None
            self._probe.unsupported(f"{FEATURE}: {type(error).__name__}: {error}")

    def _write(self, index: RequestIndex, outcome: Outcome, since_ns: int | None) -> None:
        self._probe.cache_lookup(
            index,
            tokens={
                "hit": outcome.hit,
                "off": outcome.off,
                "cleared": outcome.cleared,
                "evicted": outcome.evicted,
                "pending": outcome.pending,
                "unmatched": outcome.unmatched,
                "rule": outcome.rule,
                "rounding": outcome.rounding,
            },
            evictor=_index(outcome.evictor),
            evicted_ns=outcome.evicted_ns,
            twin=_index(outcome.twin),
            num_evictors=outcome.num_evictors,
            evictors=[RequestIndex(evictor) for evictor in outcome.evictors if evictor >= 0],
            is_inferred=outcome.is_inferred,
            off_reason=outcome.off_reason,
            since_ns=since_ns,
        )

    def _guard(self, action: Callable[[BlockHistory], None]) -> None:
        if self.history is None or not self._probe.on:
            return
        try:
            action(self.history)
        except Exception as error:
            self.fail(error)


def _index(value: int) -> RequestIndex | None:
    return RequestIndex(value) if value >= 0 else None
