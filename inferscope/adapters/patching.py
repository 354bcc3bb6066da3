"""Replacement of an engine's attributes by an adapter's wrappers, and its reversal.

    engine calls Scheduler.schedule ──► our wrapper ── before ──► original ── after ──► its result

A wrapper calls the original exactly once and passes on its result or its exception, whatever
happens in the hooks around it. The first fault in any hook disables all hooks of the adapter and
its probes, and is reported once. A hook whose target does not exist is `unsupported`: the log and
the rings report it once, and the engine runs unchanged. Hooks that open and close the same state
are a `unit`: either all of them are installed or none.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from collections.abc import Callable, Mapping
from threading import get_ident
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from inferscope.errors import InferScopeError
from inferscope.host_signals import pass_on, suppressed
from inferscope.probe import Probe, note, warn

_MARK = "_inferscope_patches"
"""Attribute of a replacement: the `Patches` that made it.

`functools.wraps` copies it to foreign wrappers around ours; calls to those still reach ours."""
_ABSENT = object()


class _Replacement:
    """A replacement of a method whose class pickles by value; the pickle holds the original."""

    __slots__ = ("__dict__", "_original", "_replacement")

    def __init__(self, replacement: FunctionType, original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._replacement, self._original = replacement, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._replacement(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, ((self._original,), 0)  # what is read needs no module of ours


class Around(NamedTuple):
    """The two hooks around one method; see `Patches.around`."""

    before: Callable[..., Any] | None = None
    after: Callable[..., Any] | None = None


Make = Callable[[Callable[..., Any], Callable[..., Any]], Callable[..., Any]]
"""Given `call` and `original`, returns a wrapper; see `Direct`."""


class Direct(NamedTuple):
    """One wrapper written out in full, for a method that is called before every dispatch.

    Two hooks around a method cost three calls and as many argument tuples each. `make(call,
    original)` returns a function that does both in one frame, and keeps their rules:

        def step(self, batch):
            if patches.is_off or (within and patches.is_within("step", self)):
                return original(self, batch)
            result = call(self, batch)
            try:
                ...what the hook does...
            except Exception as error:
                patches.caught(hook, error)
            return result

    where `within` is `patches.within`. `call` and `original` are the same function, unless the
    method overrides one that is hooked: only `call` keeps the hooks of its base from running too.
    """

    make: Make


class Patches:
    """One adapter's replacements in this process.

    Attributes:
        is_off: whether the hooks are disabled; wrappers still in place only pass calls on.
        probes: probes that the hooks write to; a fault disables them.
        forgetting: callbacks that drop references to the engine's objects once the hooks are off.
        within: overrides that are being called: attribute, `id` of the object, thread.
    """

    def __init__(self, adapter: str) -> None:
        """Start without replacements; messages name the `adapter`."""
        self.is_off = False
        self.probes: list[Probe] = []
        self.forgetting: list[Callable[[], None]] = []
        self._adapter = adapter
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        """Owner, attribute, the owner's previous value (or `_ABSENT`), the replacement."""
        self._unsupported: dict[str, None] = {}
        """Unsupported features, in the order of their reports."""
        self.within: set[tuple[str, int, int]] = set()

    def __getstate__(self) -> dict[str, object]:
        """Return the state of hooks that are off: a wrapper may be pickled along with its class."""
        return {"is_off": True}

    def find(self, module: str, name: str) -> Any:
        """Import a module and return one of its attributes; report a missing one and return None.

        An import error within the module is handled in the same way.
        """
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            self.unsupported(f"{module}.{name} is missing")
            return None

    def unsupported(self, what: str) -> None:
        """Report once, in the log and in the rings, that something cannot be observed here."""
        if what in self._unsupported:
            return
        self._unsupported[what] = None
        warn("unsupported: %s (%s)", what, self._adapter)
        for probe in self.probes:
            probe.unsupported(what)

    def attach(self, probe: Probe, *, is_observing: bool = True) -> None:
        """Add a probe that the hooks write to, and report unsupported features in its ring.

        Args:
            probe: a probe that was just opened.
            is_observing: False if the unsupported features are all that the probe would record.
        """
        self.probes.append(probe)
        for what in self._unsupported:
            probe.unsupported(what, is_everything=not is_observing)

    def detach(self, probe: Probe) -> None:
        """Remove a probe that is closed, and all that it holds; others may follow."""
        if probe in self.probes:
            self.probes.remove(probe)

    def unit(self, feature: str, owner: Any, hooks: Mapping[str, Around | Direct]) -> bool:
        """Install the hooks of a feature: all of them, or none if a target is missing.

        Args:
            feature: the feature that is not observed without them.
            owner: the class to patch; None if this version of the engine does not have it.
            hooks: hooks by the name of the method that they wrap.

        Returns:
            Whether they are installed.
        """
        if owner is None:
            self.unsupported(f"{feature}: its class is missing")
            return False
        missing = [name for name in hooks if not callable(getattr(owner, name, None))]
        if missing:
            self.unsupported(f"{feature}: {_name(owner)}.{', '.join(missing)} is missing")
            return False
        num_before = len(self._replaced)
        try:
            for name, hook in hooks.items():
                if isinstance(hook, Direct):
                    is_fit = self.direct(owner, name, hook.make)
                else:
                    is_fit = self.around(owner, name, before=hook.before, after=hook.after)
                if not is_fit:
                    self._undo(num_before)
                    self.unsupported(f"{feature}: {_name(owner)}.{name} cannot be wrapped")
                    return False
        except (AttributeError, TypeError) as error:  # a compiled class takes no attributes
            self._undo(num_before)
            self.unsupported(f"{feature}: {_name(owner)} cannot be wrapped: {error}")
            return False
        return True

    def around(
        self,
        owner: Any,
        attribute: str,
        *,
        before: Callable[..., Any] | None = None,
        after: Callable[..., Any] | None = None,
    ) -> bool:
        """Call hooks around a plain (not an async) function or method.

        Hooks around an override are called once where it calls the method of its base class, with
        the arguments and the result of the override.

        Args:
            owner: a class or a module; None does nothing, for `find` has reported it.
            attribute: name of an attribute of the owner, possibly inherited.
            before: hook that gets the call's arguments; `after` gets what it returns.
            after: hook that gets that value, the result, and the arguments; not called if the
                original raised.

        Returns:
            Whether the hooks are installed.
        """

        def make(call: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                if self.is_off or (self.within and args and self.is_within(attribute, args[0])):
                    return original(*args, **kwargs)
                noted = None if before is None else self.run(before, *args, **kwargs)
                result = call(*args, **kwargs)
                if after is not None and not self.is_off:
                    self.run(after, noted, result, *args, **kwargs)
                return result

            return wrapper

        return self.direct(owner, attribute, make)

    def direct(self, owner: Any, attribute: str, make: Make) -> bool:
        """Install one complete wrapper around a function or method; see `Direct`.

        Args:
            owner: a class or a module; None does nothing, as in `around`.
            attribute: name of an attribute of the owner, possibly inherited.
            make: function that returns the wrapper.

        Returns:
            Whether it is installed.
        """
        bases = getattr(owner, "__mro__", ())[1:]
        is_override = any(hasattr(vars(base).get(attribute), _MARK) for base in bases)

        def made(original: Callable[..., Any]) -> Callable[..., Any]:
            call = self._outermost(attribute, original) if is_override else original
            return functools.wraps(original)(make(call, original))

        return self.replace(owner, attribute, made)

    def is_within(self, attribute: str, instance: Any) -> bool:
        """Return whether this thread is inside an override, whose base's hooks must not run."""
        return (attribute, id(instance), get_ident()) in self.within

    def replace(self, owner: Any, attribute: str, make: Callable[[Any], Any]) -> bool:
        """Replace an attribute by `make(original)`, unless it is replaced already.

        This serves where `around` cannot, mainly for async functions. The result of `make` must
        call the original exactly once and guard its own hooks with `run`. It is not used where it
        cannot take all arguments of the original: the engine's own calls would fail.
        """
        if owner is None:
            return False
        original = getattr(owner, attribute, None)
        if original is None:
            self.unsupported(f"{_name(owner)}.{attribute} is missing")
            return False
        patches = getattr(original, _MARK, None)
        if patches is self or (patches is not None and not patches.is_off):
            return True
        replacement = make(original)
        misfit = _misfit(replacement, original)
        if misfit:
            self.unsupported(f"{_name(owner)}.{attribute} {misfit}")
            return False
        if _is_pickled_by_value(owner) and isinstance(replacement, FunctionType):
            is_coroutine = inspect.iscoroutinefunction(replacement)
            replacement = replacement if is_coroutine else _Replacement(replacement, original)
        setattr(replacement, _MARK, self)
        own = vars(owner).get(attribute, _ABSENT)
        setattr(owner, attribute, replacement)
        self._replaced.append((owner, attribute, own, replacement))
        return True

    def run(self, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a hook and return its result; a fault in it disables the adapter and returns None.

        Raises:
            Exception: a signal handler of the host raised one while the hook ran.
        """
        if self.is_off:
            return None
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            self.caught(hook, error)
            return None

    def caught(self, hook: Callable[..., Any], error: Exception) -> None:
        """Disable the hooks after an exception within one.

        Raises:
            Exception: the same one, if a signal handler of the host raised it.
        """
        pass_on(error)
        self.fail(hook, error)

    def fail(self, hook: Callable[..., Any], error: Exception) -> None:
        """Disable the hooks permanently and report it once; no exception leaves this method."""
        if self.is_off:
            return
        self.is_off = True
        where = getattr(hook, "__qualname__", type(hook).__name__)
        what = type(error).__name__
        try:
            what = f"{what}: {error}"
        except Exception as raised:  # by its `__str__`
            pass_on(raised)
        fault = InferScopeError(f"{self._adapter} adapter, {where}: {what}")
        note("the fault in %s", where)
        for probe in self.probes:
            probe.fail(fault)
        if not self.probes:
            warn("not observing: %s", fault)
        self._forget()

    def restore(self) -> None:
        """Restore every attribute.

        A replacement that other code has wrapped since then stays, or that wrapper would be lost;
        it only passes calls on.
        """
        self.is_off = True
        self._forget()
        self._undo(0)

    def _forget(self) -> None:
        for forget in self.forgetting:
            with suppressed(Exception):
                forget()

    def _outermost(self, attribute: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return an override that suppresses the hooks of its base's method during its calls."""

        def call(*args: Any, **kwargs: Any) -> Any:
            key = (attribute, id(args[0]), get_ident())
            self.within.add(key)
            try:
                return original(*args, **kwargs)
            finally:
                self.within.discard(key)

        return call

    def _undo(self, num_kept: int) -> None:
        while len(self._replaced) > num_kept:
            owner, attribute, own, replacement = self._replaced.pop()
            if vars(owner).get(attribute) is not replacement:
                continue
            if own is _ABSENT:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, own)


def _misfit(wrapper: Any, original: Any) -> str:
    """Return why a wrapper cannot stand for the original in all calls; empty if it can.

    The first parameter, the object, is passed by position. Others may come by keyword, so those
    that the wrapper names have to be the original's, in its order.
    """
    try:
        theirs = inspect.signature(original).parameters.values()
        ours = inspect.signature(wrapper, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # of a compiled function nothing is known
        return ""
    open_kinds = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    is_open = open_kinds <= {each.kind for each in ours}
    if open_kinds <= {each.kind for each in theirs}:
        return ""
    named = [each.name for each in ours if each.kind not in open_kinds][1:]
    known = [each.name for each in theirs if each.kind not in open_kinds][1:]
    if known[: len(named)] != named:
        return f"does not take {', '.join(named)} in this order"
    more = known[len(named) :]
    return "" if is_open or not more else f"takes {', '.join(more)} too"


def _is_pickled_by_value(owner: Any) -> bool:
    """Return whether cloudpickle stores a class by value because it cannot be imported."""
    return isinstance(owner, type) and (
        owner.__module__ == "__main__" or "<locals>" in owner.__qualname__
    )


def _name(owner: Any) -> str:
    module = getattr(owner, "__module__", None)
    return f"{module}.{owner.__qualname__}" if module else str(owner.__name__)
