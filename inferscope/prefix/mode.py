"""The switch of prefix-cache forensics.

    INFERSCOPE_PREFIX_CACHE=tokens   compares prompts token by token, in memory; the default
    INFERSCOPE_PREFIX_CACHE=blocks   holds no tokens: lookups and samples of blocks only
    INFERSCOPE_PREFIX_CACHE=off      records nothing of the prefix cache

Any other value is a mistake, for which the caller records nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

VARIABLE = "INFERSCOPE_PREFIX_CACHE"

Mode = Literal["tokens", "blocks", "off"]


def cache_mode(environment: Mapping[str, str]) -> Mode | None:
    """Return the mode that an environment asks for; None if it is not a mode."""
    asked = environment.get(VARIABLE) or "tokens"
    for mode in get_args(Mode):
        if mode == asked:
            return mode  # type: ignore[no-any-return]
    return None
