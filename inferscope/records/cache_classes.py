"""Classes of a prompt's tokens by what the prefix cache did for them, with meaning and remedy.

They are a partition: the classes of a request sum to its prompt.
"""

from __future__ import annotations

import msgspec


class CacheClass(msgspec.Struct, frozen=True):
    """One class of prompt tokens."""

    name: str
    """Name in records, JSON and labels."""
    label: str
    """Meaning in a few words, for tables."""
    advice: str = ""
    """What makes such tokens hits; empty where nothing does."""


CACHE_CLASS_ROWS = (
    CacheClass("hit", "found in the cache"),
    CacheClass(
        "off",
        "not looked up",
        "Enable the prefix cache (enable_prefix_caching), and avoid options that bypass it, such as"
        " prompt_logprobs.",
    ),
    CacheClass("cleared", "removed by a reset of the cache", "Reset the cache less often."),
    CacheClass(
        "evicted",
        "cached earlier, and evicted",
        "Give the KV cache more memory, or send the requests of one conversation to one replica.",
    ),
    CacheClass(
        "pending",
        "another request was computing them",
        "Send the first of several requests with one prefix ahead of the others.",
    ),
    CacheClass("rounding", "shorter than a KV block", "Use smaller KV blocks."),
    CacheClass("rule", "always computed by the engine"),
    CacheClass(
        "namespace",
        "cached under another salt, adapter or image",
        "Share one salt among requests that may see each other's timing.",
    ),
    CacheClass(
        "changed",
        "seen before, behind text that differs",
        "Put what changes last.",
    ),
    CacheClass("new", "never seen before"),
    CacheClass("unknown", "not explained by the records"),
)
CACHE_CLASSES = tuple(row.name for row in CACHE_CLASS_ROWS)
"""Names of all classes, in the order of tables."""
CACHE_CLASS_BY_NAME = {row.name: row for row in CACHE_CLASS_ROWS}
