"""How many examples property tests draw: few in the fast suite, all of them in `make thorough`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import settings

_SETTINGS = "_hypothesis_internal_use_settings"


def change_examples(items: Iterable[pytest.Item], num_examples: Callable[[int], int]) -> None:
    """Set each property test's number of examples, given the number that it asks for."""
    for item in items:
        test = getattr(item, "obj", None)
        used = getattr(test, _SETTINGS, None)
        if used is not None:
            changed = settings(used, max_examples=num_examples(used.max_examples))
            setattr(test, _SETTINGS, changed)
