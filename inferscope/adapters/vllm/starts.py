"""Engine ids of the engines that one process starts.

The cores and workers of an engine inherit its id in an environment variable. A step is identified
by its replica and number, so two engines with one id would mix: while an engine of the process
runs, the next one is started with `-2` behind the id. Engines one after the other have the same id.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from typing import Any

from inferscope.adapters.patching import Direct, Patches
from inferscope.probe import ENGINE_ID_VARIABLE, engine_id

_PLACE_OF_ADDRESSES = 4
"""Place of the last positional argument of `MPClient`, `client_addresses`."""


class Starts:
    """Starts of engines, by the clients that make them."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def install(self, client_class: Any) -> None:
        """Hook `MPClient`, which starts an engine's processes unless it is given their addresses.

        Starts in several threads at once are not distinguished.
        """
        hooks = {"__init__": Direct(self._init)}
        self._patches.unit("engines beside each other in a process", client_class, hooks)

    def id_of(self, client: Any) -> str | None:
        """Return the id of a client's engine; None if it is the process's own."""
        number = 1 if client is None else self._numbers.get(client, 1)
        return None if number == 1 else f"{engine_id()}-{number}"

    def _init(self, call: Callable[..., None], _: Callable[..., None]) -> Callable[..., None]:
        run = self._patches.run

        def __init__(client: Any, *args: Any, **kw: Any) -> None:
            own_id = run(self._begin, client, *args, **kw)
            try:
                call(client, *args, **kw)
            except BaseException:
                run(self._numbers.pop, client, None)
                raise
            finally:
                if own_id is not None:
                    os.environ[ENGINE_ID_VARIABLE] = own_id

        return __init__

    def _begin(self, client: Any, *args: Any, **kw: Any) -> str | None:
        """Set the variable for an engine beside others; return what it was, or None if it stays."""
        if any((kw.get("client_addresses"), *args[_PLACE_OF_ADDRESSES:])):
            return None
        taken = {number for each, number in list(self._numbers.items()) if _is_live(each)}
        number = next(number for number in itertools.count(1) if number not in taken)
        self._numbers[client] = number
        new_id = self.id_of(client)
        if new_id is None:
            return None
        own_id = os.environ[ENGINE_ID_VARIABLE]
        os.environ[ENGINE_ID_VARIABLE] = new_id
        return own_id


def _is_live(client: Any) -> bool:
    """Return whether a client still has its engine; a shutdown detaches the finaliser."""
    return bool(getattr(getattr(client, "_finalizer", None), "alive", True))
