"""What happened, kept until nothing that happened before it can still come to light."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import Any


class Timeline:
    """Actions by the time at which they happened; equal times in the order of arrival.

    Nearly all of them come in order and are run soon, so a sorted list is enough.
    """

    def __init__(self) -> None:
        self._actions: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def push(self, at_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Keep an action for the sweep over its time."""
        self._order += 1
        actions = self._actions
        entry = (at_ns, self._order, action, arguments)
        if actions and at_ns < actions[-1][0]:
            insort(actions, entry)
        else:
            actions.append(entry)

    def sweep(self, before_ns: int, *, arrive: Callable[[int], None]) -> None:
        """Run all actions before a time, in order. They push no others.

        Args:
            before_ns: nothing before this can change any more.
            arrive: called with each action's time ahead of it.
        """
        actions, num = self._actions, 0
        for at_ns, _, action, arguments in actions:
            if at_ns >= before_ns:
                break
            arrive(at_ns)
            action(*arguments)
            num += 1
        del actions[:num]
