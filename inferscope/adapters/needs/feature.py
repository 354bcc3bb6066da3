"""A table of what an adapter needs of its engine: features, each with its places and fields.

    Feature "pauses"
      Place   vllm.v1.core.sched.scheduler:Scheduler.set_pause_state(pause_state)   a hook is there
      Fields  vllm.v1.outputs:KVConnectorOutput  finished_recving                   a hook reads it

The tables are data, read by no hook: importing one imports nothing of the engine. A test compares
them with what the adapters hook.
"""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """A function or method that a hook is put around."""

    target: str
    """`module:Class.method`, or `module:function`."""
    takes: tuple[str, ...] = ()
    """Parameters that the hook has too, by these names, in this order, after `self`."""
    is_open: bool = True
    """The hook takes any more arguments that the engine passes."""


class Fields(NamedTuple):
    """Attributes of a class that hooks read, and that they cannot do without."""

    target: str
    """`module:Class`."""
    names: tuple[str, ...]


class Feature(NamedTuple):
    """What is observed by some hooks; where one of its needs is missing, it is unsupported."""

    name: str
    """As the adapter reports it."""
    places: tuple[Place, ...]
    fields: tuple[Fields, ...] = ()
    otherwise: tuple[Place, ...] = ()
    """Places that serve as well, where one of the others is missing."""
    is_needed: bool = False
    """Without it the engine is not observed."""


class Engine(NamedTuple):
    """What one adapter needs."""

    package: str
    distribution: str
    observe: str
    """What to run to observe it."""
    features: tuple[Feature, ...]
