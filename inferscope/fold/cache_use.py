"""What the prefix cache did for a final request's prompt, and what its misses cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from msgspec.structs import replace

from inferscope.attribution import CacheSegment
from inferscope.records import CACHE_CLASSES


class RequestName(msgspec.Struct):
    """Names of another request: the evictor, the twin, or the earlier prompt."""

    request_id: str
    """Engine's own ID of the request."""
    external_id: str | None = None
    """Client's ID; None where it gave none."""
    tenant: str = ""
    """Tenant; empty without one."""


class PromptDifference(msgspec.Struct, frozen=True, gc=False):
    """Comparison of a prompt with the most similar earlier one, in positions."""

    earlier: RequestName | None
    """Request of the earlier prompt; None if its name is forgotten."""
    diverged_at: int
    """Number of first tokens that are equal."""
    equal_again_at: int | None
    """Position from which the earlier prompt's text goes on; None if it does not."""
    shift: int
    """Position there minus the position in the earlier prompt."""
    spans: tuple[tuple[int, int], ...]
    """Start and end of spans behind the difference that earlier prompts held."""
    differs: tuple[str, ...]
    """What separates the two prompts' caches: salt, lora, multimodal."""
    part: str
    """Declared part in which the texts differ; empty without parts."""


class CacheUse(msgspec.Struct, frozen=True, gc=False):
    """Partition of a prompt's tokens by class, with positions and prices."""

    segments: tuple[CacheSegment, ...]
    """Tokens and prices by class and declared part; they sum to the prompt and its prefill."""
    at_ns: int = 0
    """Time of the lookup."""
    recomputed_ns: int = 0
    """Prefill repeated after preemptions, which is part of no segment."""
    queue_evicted_ns: int | None = None
    """Part of the `queue` row before the first token in which the device recomputed evicted tokens
    of any request; None if unknown."""
    evictor: RequestName | None = None
    """Request for which the first evicted block made room; None if unknown."""
    evictors: tuple[RequestName, ...] = ()
    """Likeliest evictors, that one first, if evictions were derived."""
    num_evictors: int = 0
    """Number of requests that may be the evictor, likewise; 0 if it was observed."""
    evicted_ns: int | None = None
    """Time of that eviction, or of the reset of the cache."""
    is_inferred: bool = False
    """Whether evictions were derived, not observed block by block."""
    twin: RequestName | None = None
    """Request that was computing the pending tokens."""
    off_reason: str = ""
    """Reason why the cache was not asked."""
    difference: PromptDifference | None = None
    """Comparison with the most similar earlier prompt; None if it begins like none."""
    below_block_tokens: int = 0
    """Tokens equal to the earlier prompt's that do not fill a block."""
    block_tokens: int = 0
    """Tokens of a KV block; 0 if unknown."""

    def with_tenants(self, shown: Callable[[str], str]) -> CacheUse:
        """Return this with the tenants of other requests replaced."""

        def name(other: RequestName | None) -> RequestName | None:
            return None if other is None else replace(other, tenant=shown(other.tenant))

        difference = self.difference
        if difference is not None:
            difference = replace(difference, earlier=name(difference.earlier))
        return replace(
            self,
            evictor=name(self.evictor),
            evictors=tuple(replace(each, tenant=shown(each.tenant)) for each in self.evictors),
            twin=name(self.twin),
            difference=difference,
        )

    @property
    def prompt_tokens(self) -> int:
        """Return the length of the prompt."""
        return sum(each.tokens for each in self.segments)

    @property
    def is_reordered(self) -> bool:
        """Return whether the text that was seen before stands in several places or orders."""
        difference = self.difference
        if difference is None or not self.tokens.get("changed"):
            return False
        again_at = difference.equal_again_at
        moved_at_once = again_at is None or (again_at == difference.diverged_at)
        return len(difference.spans) > 1 or (moved_at_once and difference.shift != 0)

    @property
    def tokens(self) -> dict[str, int]:
        """Return the tokens by class, without absent classes."""
        return _by_class((each.name, each.tokens) for each in self.segments)

    @property
    def gpu_ns(self) -> dict[str, int] | None:
        """Return the price in device time by class; None if unknown."""
        return self._priced([each.gpu_ns for each in self.segments])

    @property
    def ttft_ns(self) -> dict[str, int] | None:
        """Return the price in time before the first token by class; None if unknown."""
        return self._priced([each.ttft_ns for each in self.segments])

    def _priced(self, prices_ns: list[int | None]) -> dict[str, int] | None:
        known = [price_ns for price_ns in prices_ns if price_ns is not None]
        if len(known) < len(prices_ns):
            return None
        names = [each.name for each in self.segments]
        return _by_class(zip(names, known, strict=True))


def _by_class(amounts: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for name, amount in amounts:
        sums[name] = sums.get(name, 0) + amount
    return {name: sums[name] for name in CACHE_CLASSES if name in sums}
