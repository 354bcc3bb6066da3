"""Injection: an engine without a plug-in group is observed as soon as it is imported.

`inferscope run` puts `shim/` on PYTHONPATH; its `sitecustomize` calls `install` before the program
begins. Nothing is imported that the program does not import itself: a finder that knows the names
in `MODULES` waits for them, and calls the observer once the module has been executed.

A new engine is one line in `inferscope.adapters.registry`.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from inferscope.adapters.registry import MODULES
from inferscope.host_signals import pass_on
from inferscope.probe import warn


def install(observers: Mapping[str, str] = MODULES) -> None:
    """Observe the engines that are imported, unless INFERSCOPE_INJECT=0 forbids it; never raises.

    Does nothing without INFERSCOPE=1.
    """
    if os.environ.get("INFERSCOPE") == "1" and os.environ.get("INFERSCOPE_INJECT") != "0":
        when_imported(observers)


def when_imported(observers: Mapping[str, str]) -> None:
    """Observe these modules: now those that are imported, the others when they are."""
    waiting = dict(observers)
    for name in observers:
        module = sys.modules.get(name)
        if module is not None:
            _observe(module, waiting.pop(name))
    if waiting:
        sys.meta_path.insert(0, _Waiting(waiting))


class _Waiting(MetaPathFinder):
    """Finder of no modules: it has loaders report when an awaited module is executed."""

    def __init__(self, observers: dict[str, str]) -> None:
        self._observers = observers

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._observers:
            return None
        # Those before it have been asked.
        others = itertools.dropwhile(lambda finder: finder is not self, list(sys.meta_path))
        for finder in itertools.islice(others, 1, None):
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    try:
                        _call_when_executed(spec.loader, self._executed)
                    except (AttributeError, TypeError) as error:  # it takes no attributes
                        del self._observers[fullname]  # it is looked up again and again
                        warn("%s is not observed: %s", fullname, error)
                return spec
        return None

    def _executed(self, module: ModuleType) -> bool:
        """Observe a module, once, and return whether it was waited for.

        It may have been looked up, or failed to execute, before.
        """
        observer = self._observers.pop(module.__name__, None)
        if observer is not None:
            _observe(module, observer)
        return observer is not None


def _call_when_executed(loader: Any, observe: Callable[[ModuleType], bool]) -> None:
    """Call `observe` after each module that a loader executes; its class stays as it was."""
    execute = loader.exec_module
    if (
        getattr(execute, "observe", None) == observe
    ):  # one loader serves several modules, or is found again
        return

    def exec_module(module: ModuleType) -> None:
        execute(module)
        if observe(module):
            vars(loader).pop("exec_module", None)

    exec_module.observe = observe  # type: ignore[attr-defined]
    loader.exec_module = exec_module


def _observe(module: ModuleType, observer: str) -> None:
    """Call an observer; its faults are logged and never reach the program."""
    where, _, function = observer.partition(":")
    try:
        getattr(importlib.import_module(where), function)(module)
    except Exception as error:
        pass_on(error)
        warn("%s is not observed: %s: %s", module.__name__, type(error).__name__, error)
