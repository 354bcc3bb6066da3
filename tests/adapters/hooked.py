"""What adapters hook, noted as they hook it: owners, methods and the parameters of the hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from inferscope.adapters.patching import Patches


class Hooked(NamedTuple):
    """A place that was hooked."""

    feature: str | None
    """Name of the unit that the hook belongs to; None for a single hook."""
    module: str
    path: str
    """`Class.method`, or the name of a function."""
    takes: tuple[str, ...]
    is_open: bool


class Recording(Patches):
    """Patches that note what they replace, and replace it."""

    def __init__(self, adapter: str) -> None:
        super().__init__(adapter)
        self.hooked: set[Hooked] = set()
        self._feature: str | None = None
        self._around: tuple[tuple[str, ...], bool] | None = None

    def unit(self, feature: str, owner: Any, hooks: Mapping[str, Any]) -> bool:
        self._feature = feature
        try:
            return super().unit(feature, owner, hooks)
        finally:
            self._feature = None

    def around(
        self,
        owner: Any,
        attribute: str,
        *,
        before: Callable[..., Any] | None = None,
        after: Callable[..., Any] | None = None,
    ) -> bool:
        taken = [parameters(hook, skip) for hook, skip in ((before, 1), (after, 3)) if hook]
        named = max((names for names, _ in taken), key=len)
        assert all(names == named[: len(names)] for names, _ in taken)
        self._around = named, all(is_open for _, is_open in taken)
        try:
            return super().around(owner, attribute, before=before, after=after)
        finally:
            self._around = None

    def replace(self, owner: Any, attribute: str, make: Callable[[Any], Any]) -> bool:
        taken = self._around

        def made(original: Any) -> Any:
            replacement = make(original)
            names, is_open = taken or parameters(replacement, 1)
            is_class = isinstance(owner, type)
            module = owner.__module__ if is_class else owner.__name__
            path = f"{owner.__qualname__}.{attribute}" if is_class else attribute
            self.hooked.add(Hooked(self._feature, module, path, names, is_open))
            return replacement

        return super().replace(owner, attribute, made)


def parameters(hook: Callable[..., Any], skip: int) -> tuple[tuple[str, ...], bool]:
    """Return the names that a hook gives to arguments behind the first ones, and if it takes more.

    Args:
        hook: as it is called.
        skip: what comes before the call's own arguments: results, and the object.
    """
    given = list(inspect.signature(hook, follow_wrapped=False).parameters.values())
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [each.name for each in given if each.kind not in rest]
    return tuple(named[skip:]), any(each.kind in rest for each in given)
