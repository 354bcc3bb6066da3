"""Forensics of the prefix cache: why tokens were not in it, in bounded memory of the engine."""

from inferscope.prefix.keys import block_keys, first_key, packed
from inferscope.prefix.likeness import Likeness, Namespace, PromptHistory
from inferscope.prefix.lookups import BlockHistory, Outcome
from inferscope.prefix.mode import VARIABLE, Mode, cache_mode
from inferscope.prefix.sampling import BlockSampler

__all__ = [
    "VARIABLE",
    "BlockHistory",
    "BlockSampler",
    "Likeness",
    "Mode",
    "Namespace",
    "Outcome",
    "PromptHistory",
    "block_keys",
    "cache_mode",
    "first_key",
    "packed",
]
