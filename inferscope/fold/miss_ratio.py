"""Miss-ratio curve of a KV cache from digests of sampled blocks.

A block hits in every cache of more blocks than were accessed since its own last access. SHARDS
(Waldspurger et al., FAST '15) counts these distances over blocks whose digest is below a threshold,
a share `rate` of all, and scales them up:

    distance in blocks = 1 + sampled blocks accessed since / rate
    hits at size n     = sampled accesses with distance <= n, 1 / rate each - excess

The correction of its first bucket: the samples stand for `excess` accesses more than there were
(fewer if negative), by the most popular blocks, which hit at any size. The rate may fall, and then
blocks above the threshold are dropped.

The errors of nearby sizes go together. So the capacity misses, those that the largest cache avoids,
are scaled until the curve meets the hit ratio that the engine reports at its own size. If the
samples show none, there is nothing to scale, and the whole curve is moved there. Tokens that
another request was computing miss at any size.

Bounds: blocks beyond LONGEST times the pool count as never seen, so at most that many are kept.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

SIZES = (0.5, 1.0, 2.0, 4.0)
"""Sizes of the published curve, in multiples of the pool."""
LONGEST = 8
"""Largest size of a curve, in multiples of the pool."""
_BINS = 128
"""Bins of the distance per pool."""
_MOST_TENANTS = 64
_MOST_KEPT = 65_536
_MOST_SCALED = 4.0
"""Largest factor by which capacity misses are scaled up or down."""
_DIGESTS = 1 << 64
"""Number of possible digests; those below `rate` of it are sampled."""
OTHER_TENANT = "other"
"""Tenants beyond the limit."""


class CurvePoint(msgspec.Struct, frozen=True, gc=False):
    """Hit ratio of the same requests with a KV cache of another size."""

    size: float
    """Size as a multiple of the pool."""
    blocks: int
    """Size in blocks."""
    hit_share: float | None
    """Prompt tokens found in the cache, over all; None if it is withheld."""
    withheld: str = ""
    """Reason why it is withheld; empty if it is not."""


class Curve(msgspec.Struct, frozen=True):
    """Hit ratio by size of the KV cache."""

    points: tuple[CurvePoint, ...]
    """Points, the smallest size first; ratios never fall."""
    prompt_tokens: int
    """Prompt tokens of the requests that it covers."""
    sampled: int
    """Accesses of sampled blocks that it rests on."""
    sampled_share: float
    """Share of blocks that are sampled."""
    peak_blocks: int
    """Most blocks held by requests at once; smaller caches would queue or preempt them."""


class _Accesses:
    """Accesses of one tenant's requests; each sampled one counts for 1 / rate."""

    __slots__ = (
        "by_distance",
        "hit_tokens",
        "num",
        "num_blocks",
        "pending_tokens",
        "prompt_tokens",
        "weight",
    )

    def __init__(self) -> None:
        self.by_distance = array("d", bytes(8 * (LONGEST * _BINS + 1)))
        """Repeated accesses by bin of distance; the last bin holds longer ones."""
        self.num = 0
        """Accesses of sampled blocks."""
        self.weight = 0.0
        """Accesses that these stand for."""
        self.num_blocks = 0
        """Accesses of all blocks, sampled or not."""
        self.prompt_tokens = 0
        self.hit_tokens = 0
        """Prompt tokens that the engine found in its cache."""
        self.pending_tokens = 0
        """Prompt tokens that another request was computing."""


class MissRatio:
    """Accesses to the KV cache of one replica."""

    def __init__(self, pool_blocks: int) -> None:
        """Start before the first access to a pool of some blocks, at least one."""
        self.pool_blocks = pool_blocks
        self.block_tokens = 0
        self.rate = 1.0
        self._last: OrderedDict[int, int] = OrderedDict()
        """Last access by digest, the oldest first."""
        self._times: list[int] = []
        """Last accesses, ascending."""
        self._clock = 0
        self._by_tenant: dict[str, _Accesses] = {}

    def prompt(
        self,
        num_tokens: int,
        digests: Sequence[int],
        *,
        num_blocks: int,
        block_tokens: int,
        rate: float,
        tenant: str,
        hit_tokens: int,
        pending_tokens: int = 0,
    ) -> None:
        """Add an admitted prompt.

        Args:
            num_tokens: its length.
            digests: digests of its sampled blocks, in the order of the prompt.
            num_blocks: blocks of it that a cache can hold, sampled or not.
            block_tokens: tokens of a block.
            rate: share of blocks that are sampled, above 0 and at most 1; it never rises.
            tenant: tenant of the request; empty without one.
            hit_tokens: tokens of it that the engine found in its cache.
            pending_tokens: tokens of it that another request was computing.
        """
        self.block_tokens = block_tokens
        if rate < self.rate:
            self._thin(rate)
        of = self._of(tenant)
        of.prompt_tokens += num_tokens
        of.num_blocks += num_blocks
        of.hit_tokens += hit_tokens
        of.pending_tokens += pending_tokens
        limit, weight = int(self.rate * _DIGESTS), 1 / self.rate
        digests = [digest for digest in digests if digest < limit]
        of.num += len(digests)
        of.weight += weight * len(digests)
        # An engine looks up the whole prompt before it allocates a block for it.
        last, times = self._last, self._times
        for digest in digests:
            before = last.get(digest)
            if before is not None:
                num_since = len(times) - bisect_left(times, before) - 1
                at = _bin((1 + num_since * weight) / self.pool_blocks)
                of.by_distance[min(at, LONGEST * _BINS)] += weight
        # It evicts the tail of a prompt before its head, as if the head were used last.
        for digest in reversed(digests):
            self._touch(digest)

    def _touch(self, digest: int) -> None:
        """Make a block the one used last."""
        last, times = self._last, self._times
        before = last.pop(digest, None)
        if before is not None:
            del times[bisect_left(times, before)]
        self._clock += 1
        last[digest] = self._clock
        times.append(self._clock)
        if len(times) > min(_MOST_KEPT, LONGEST * self.pool_blocks * self.rate + 1):
            last.popitem(last=False)
            del times[0]

    def _thin(self, rate: float) -> None:
        """Lower the rate: drop the blocks that are not sampled any more."""
        self.rate = rate
        limit = int(rate * _DIGESTS)
        for digest in [digest for digest in self._last if digest >= limit]:
            del self._last[digest]
        self._times = list(self._last.values())

    def _of(self, tenant: str) -> _Accesses:
        if tenant not in self._by_tenant and len(self._by_tenant) >= _MOST_TENANTS:
            tenant = OTHER_TENANT
        return self._by_tenant.setdefault(tenant, _Accesses())

    @property
    def tenants(self) -> tuple[str, ...]:
        """Return the tenants with requests, by name."""
        return tuple(sorted(self._by_tenant))

    def hit_tokens(self, sizes: Iterable[float], tenant: str | None) -> list[float]:
        """Return the prompt tokens that caches of these sizes would hold, for one or all tenants.

        Args:
            sizes: multiples of the pool, at most LONGEST.
            tenant: one tenant; None for all.
        """
        chosen = self._chosen(tenant)
        pending = sum(each.pending_tokens for each in chosen)
        now, most, *modelled = self.modelled_hit_tokens([1.0, LONGEST, *sizes], tenant)
        actual = sum(each.hit_tokens for each in chosen) + pending
        if most <= now:
            return [max(0.0, hits + actual - now - pending) for hits in modelled]
        scale = (most - actual) / (most - now)
        scale = min(max(scale, 1 / _MOST_SCALED), _MOST_SCALED)
        return [max(0.0, most - scale * (most - hits) - pending) for hits in modelled]

    def modelled_hit_tokens(self, sizes: Iterable[float], tenant: str | None) -> list[float]:
        """Return the same from the samples alone."""
        chosen = self._chosen(tenant)
        # The excess of all accesses, by blocks: one tenant's requests share a few popular blocks.
        whole = self._chosen(None)
        num_blocks = sum(each.num_blocks for each in whole)
        excess = sum(each.weight for each in whole) - num_blocks
        mine = sum(each.num_blocks for each in chosen) / num_blocks if num_blocks else 0.0
        found = []
        for size in sizes:
            until = min(_bin(size), LONGEST * _BINS - 1) + 1
            hits = sum(sum(each.by_distance[:until]) for each in chosen)
            found.append(max(0.0, hits - excess * mine) * self.block_tokens)
        return found

    def prompt_tokens(self, tenant: str | None) -> int:
        """Return the prompt tokens of one or all tenants."""
        return sum(each.prompt_tokens for each in self._chosen(tenant))

    def num_sampled(self, tenant: str | None) -> int:
        """Return the accesses of sampled blocks by one or all tenants."""
        return sum(each.num for each in self._chosen(tenant))

    def _chosen(self, tenant: str | None) -> list[_Accesses]:
        if tenant is None:
            return list(self._by_tenant.values())
        return [self._by_tenant[tenant]] if tenant in self._by_tenant else []


def _bin(size: float) -> int:
    """Return the bin of a distance, or of the largest distance that hits, in pools."""
    return max(0, -int(-size * _BINS // 1) - 1)


def curve(
    replicas: Sequence[MissRatio],
    *,
    peak_blocks: int,
    tenant: str | None = None,
    sizes: Sequence[float] = SIZES,
) -> Curve | None:
    """Return the curve of an engine's replicas, each with a cache of its own.

    Args:
        replicas: accesses by replica, of equal pools.
        peak_blocks: most blocks of one replica that requests held at once.
        tenant: tenant whose requests count; None for all.
        sizes: multiples of the pool, at most LONGEST.

    Returns:
        the curve; None without requests.
    """
    prompt_tokens = sum(each.prompt_tokens(tenant) for each in replicas)
    if not prompt_tokens:
        return None
    pool_blocks = replicas[0].pool_blocks
    by_replica = [each.hit_tokens(sizes, tenant) for each in replicas]
    points = []
    for at, size in enumerate(sizes):
        blocks = round(size * pool_blocks)
        ratio = min(1.0, sum(hits[at] for hits in by_replica) / prompt_tokens)
        if blocks < peak_blocks:
            why = f"requests held up to {peak_blocks:,} blocks at once, more than {blocks:,}"
            points.append(CurvePoint(size, blocks, None, why))
        else:
            points.append(CurvePoint(size, blocks, ratio))
    return Curve(
        tuple(sorted(points, key=lambda point: point.size)),
        prompt_tokens,
        sum(each.num_sampled(tenant) for each in replicas),
        replicas[0].rate,
        peak_blocks,
    )
