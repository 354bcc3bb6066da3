"""CPU time of hooks on a step's critical path, by the clock of the engine's thread.

    entry ── before ──► original ── after ──► return          of each hooked method

A method's instrument reads the thread's clock at its entry and return, and around the original;
what is left is the hooks' own. The same instrument around wrappers that do nothing gives its floor,
which is subtracted. The original evicts our code from the caches, as in any engine.

With a device that computes beside the host, what runs between dispatch and wait is hidden: here the
flush in `get_grammar_bitmask` and what `execute_model` does behind the launch. All else is path.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

HIDDEN = {("get_grammar_bitmask", "before"), ("get_grammar_bitmask", "after")} | {
    ("execute_model", "after")
}
STEP = (
    *("schedule", "execute_model", "get_grammar_bitmask", "sample_tokens", "update_from_output"),
    *("_model_forward", "_bookkeeping_sync"),
)
"""Hooked methods called once in every step; the last two are nested in others."""
_now = time.thread_time_ns
Replaced = tuple[Any, str, Any, Any]


class PathTimes:
    """Instrumentation of installed hooks that sums their durations."""

    def __init__(self, replaced: Iterable[Replaced]) -> None:
        """Instrument the methods replaced by a `Patches`, except those not called in every step."""
        self._replaced = [one for one in replaced if one[1] in STEP]
        self._originals = {
            (owner, name): _cell(ours, "call").cell_contents
            for owner, name, _, ours in self._replaced
        }
        self.taken: dict[tuple[str, str], list[int]] = defaultdict(list)

    def instrument(self, *, is_on: bool) -> None:
        """Measure the hooks, or wrappers in their place that do nothing."""
        self.restore()
        self.taken.clear()
        for owner, name, _, ours in self._replaced:
            entered = [0, 0]
            inner = _inner(self._originals[owner, name], entered)
            if is_on:
                _cell(ours, "call").cell_contents = inner
            setattr(owner, name, self._outer(name, ours if is_on else _nothing(inner), entered))

    def restore(self) -> None:
        """Remove the instrumentation."""
        for owner, name, _, ours in self._replaced:
            _cell(ours, "call").cell_contents = self._originals[owner, name]
            setattr(owner, name, ours)

    def medians_us(self) -> dict[tuple[str, str], float]:
        """Return the median of each part of each hook in microseconds."""
        return {part: statistics.median(ns) / 1e3 for part, ns in self.taken.items()}

    def _outer(
        self, name: str, hooked: Callable[..., Any], entered: list[int]
    ) -> Callable[..., Any]:
        before, after = self.taken[name, "before"], self.taken[name, "after"]

        def outer(*args: Any, **kwargs: Any) -> Any:
            began = _now()
            result = hooked(*args, **kwargs)
            ended = _now()
            before.append(entered[0] - began)
            after.append(ended - entered[1])
            return result

        return outer


def _inner(original: Callable[..., Any], entered: list[int]) -> Callable[..., Any]:
    def inner(*args: Any, **kwargs: Any) -> Any:
        entered[0] = _now()
        result = original(*args, **kwargs)
        entered[1] = _now()
        return result

    return inner


def _nothing(inner: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    return wrapper


def _cell(wrapper: Any, name: str) -> Any:
    return wrapper.__closure__[wrapper.__code__.co_freevars.index(name)]
