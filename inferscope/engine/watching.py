"""Observation of a reference engine that was created without a probe."""

from __future__ import annotations

from pathlib import Path

from inferscope.engine.core import Engine
from inferscope.engine.devices import step_timer
from inferscope.engine.load import describe
from inferscope.errors import BadInput
from inferscope.probe import Probe


class EngineHandle:
    """Handle of an observed engine; closing it ends the observation."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._previous_probe = engine.probe
        self._probe = engine.probe = Probe.open(
            describe(engine, name="reference"), timer=step_timer(engine.model.device)
        )

    @property
    def path(self) -> Path | None:
        """Path of the ring; None if nothing is recorded."""
        return self._probe.path

    def close(self) -> None:
        """Restore the engine's previous probe."""
        if self._engine.probe is self._probe:
            self._engine.probe = self._previous_probe
        self._probe.close()


def watch(subject: object) -> EngineHandle:
    """Observe an engine and return its handle.

    Raises:
        BadInput: the subject is not an engine, or requests are running that no probe knows.
    """
    if not isinstance(subject, Engine):
        raise BadInput(f"{type(subject).__name__} cannot be observed. Give an engine, or a model.")
    if subject.has_work:
        raise BadInput(
            "the engine has running requests. Observe it before its first one, or between two."
        )
    return EngineHandle(subject)
