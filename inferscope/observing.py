"""`inferscope.observe`: record a model or an engine of this very process."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Protocol

from inferscope.errors import BadInput

_ADAPTERS = {
    "transformers": "inferscope.adapters.transformers:watch",
    "llama_cpp": "inferscope.adapters.llama_cpp:watch",
    "inferscope": "inferscope.engine.watching:watch",
}
"""By the package of a class: who observes its instances. By name, for nobody pays for the others'
engines, and this package is imported by all."""


class Watch(Protocol):
    """What an adapter does for one subject, until it is closed."""

    @property
    def path(self) -> Path | None:
        """The ring that is written."""

    def close(self) -> None:
        """Put everything back."""


class Observation:
    """What `observe` returns: close it, or leave its `with` block, to put everything back.

    Attributes:
        path: the ring that is written, for `inferscope attach`; None where nothing is recorded.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.path = watch.path

    def close(self) -> None:
        """Stop observing and restore every attribute that was replaced. Safe to call twice."""
        self._watch.close()

    def __enter__(self) -> Observation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def observe(subject: object) -> Observation:
    """Record what a model does from now on; `inferscope attach` shows it.

        observation = inferscope.observe(model)
        model.generate(…)

    Outputs stay as they are, to the bit: functions around the decoding loop are wrapped, never the
    forward pass, and a failure inside switches the recording off with one line.

    Args:
        subject: a transformers model with `generate`, its continuous batching manager, a
            `llama_cpp.Llama`, or an engine of `inferscope.engine` that has not begun.

    Raises:
        BadInput: it is none of these.
    """
    for cls in type(subject).__mro__:
        place = _ADAPTERS.get(cls.__module__.partition(".")[0])
        if place is not None and cls is not object:
            module, _, function = place.partition(":")
            watch: Callable[[object], Watch] = getattr(import_module(module), function)
            return Observation(watch(subject))
    raise BadInput(
        f"{type(subject).__name__} cannot be observed. Give a transformers model, a "
        "llama_cpp.Llama or an engine; for a loop of your own see docs/instrument.md."
    )
