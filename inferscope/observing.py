"""The function `inferscope.observe`: record a model or an engine of this process."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Protocol

from inferscope.adapters import SUBJECTS
from inferscope.errors import BadInput


class Handle(Protocol):
    """An adapter's observation of one subject, until it is closed."""

    @property
    def path(self) -> Path | None:
        """Path of the ring."""

    def close(self) -> None:
        """Restore everything that was replaced."""


class Observation:
    """A running observation: closing it, or leaving its `with` block, restores the subject.

    Attributes:
        path: path of the ring, for `inferscope attach`; None if nothing is recorded.
    """

    def __init__(self, watch: Handle) -> None:
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
    """Record a model's requests from now on; `inferscope attach` shows them.

        observation = inferscope.observe(model)
        model.generate(…)

    Outputs are unchanged to the bit: functions around the decoding loop are wrapped, never the
    forward pass. An internal failure stops the recording with one log line.

    Args:
        subject: a transformers model with `generate`, its continuous batching manager, a
            `llama_cpp.Llama`, or an engine of `inferscope.engine` that has not started.

    Raises:
        BadInput: the subject is none of these.
    """
    for cls in type(subject).__mro__:
        place = SUBJECTS.get(cls.__module__.partition(".")[0])
        if place is not None and cls is not object:
            module, _, function = place.partition(":")
            watch: Callable[[object], Handle] = getattr(import_module(module), function)
            return Observation(watch(subject))
    raise BadInput(
        f"cannot observe {type(subject).__name__}. Give a transformers model, a "
        "llama_cpp.Llama or an engine; for a loop of your own see docs/instrument.md."
    )
