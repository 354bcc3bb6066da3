"""Observing a reference engine that somebody has made without a probe."""

from __future__ import annotations

from pathlib import Path

from inferscope.engine.core import Engine
from inferscope.engine.devices import step_timer
from inferscope.engine.load import describe
from inferscope.errors import BadInput
from inferscope.probe import Probe


class Watch:
    """An engine's probe, until it is closed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = engine.probe
        self._probe = engine.probe = Probe.open(
            describe(engine, name="reference"), timer=step_timer(engine.model.device)
        )

    @property
    def path(self) -> Path | None:
        """The ring that is written."""
        return self._probe.path

    def close(self) -> None:
        """Give the engine back the probe that it had."""
        if self._engine.probe is self._probe:
            self._engine.probe = self._before
        self._probe.close()


def watch(subject: object) -> Watch:
    """Observe an engine.

    Raises:
        BadInput: it is none, or serves requests, which nobody has introduced to a probe.
    """
    if not isinstance(subject, Engine):
        raise BadInput(f"{type(subject).__name__} cannot be observed. Give an engine, or a model.")
    if subject.has_work:
        raise BadInput(
            "the engine has requests under way. Observe it before its first one, or between two."
        )
    return Watch(subject)
