"""What happened, kept until nothing that happened before it can still come to light."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

_AT_NS = itemgetter(0)


class Timeline:
    """Actions by the time at which they happened; equal times in the order of arrival.

    Nearly all of them come in order and are run soon, so a sorted list is enough.
    """

    def __init__(self) -> None:
        self._actions: list[tuple[int, Callable[..., None], tuple[Any, ...]]] = []

    def push(self, at_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Keep an action for the sweep over its time."""
        actions = self._actions
        if actions and at_ns < actions[-1][0]:
            insort(actions, (at_ns, action, arguments), key=_AT_NS)
        else:
            actions.append((at_ns, action, arguments))

    def waiting(self) -> Iterable[tuple[int, Callable[..., None], tuple[Any, ...]]]:
        """Return what is kept: time, action and arguments, in order."""
        return self._actions

    def sweep(self, before_ns: int, *, arrive: Callable[[int], None]) -> None:
        """Run all actions before a time, in order. They push no others.

        Args:
            before_ns: nothing before this can change any more.
            arrive: called with each action's time ahead of it.
        """
        actions, num = self._actions, 0
        for at_ns, action, arguments in actions:
            if at_ns >= before_ns:
                break
            arrive(at_ns)
            action(*arguments)
            num += 1
        del actions[:num]
