"""The end of a collector: what engines recorded before the signal is still exported."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar

import pytest

from inferscope.daemon.config import read_config
from inferscope.daemon.exporter_set import ExporterSet
from inferscope.daemon.service import Service
from inferscope.fold.snapshots import Snapshot
from inferscope.probe import EngineInfo, Probe
from inferscope.probe.clock import SystemClock
from inferscope.records import PREFILL
from tests.fold.scripts import Finals


class Kept(Finals):
    """An exporter that stores its records."""

    is_live: ClassVar[bool] = True
    is_closed = False
    view: Snapshot | None = None

    def describe(self) -> str:
        return "keeps"

    def open(self) -> None:
        pass

    def on_snapshot(self, snapshot: Snapshot) -> None:
        assert not self.is_closed
        self.view = snapshot

    def close(self) -> None:
        self.is_closed = True


class LastMinute:
    """Serves a request once the engine is in sight, and asks for the end in the same instant."""

    wants_pin = wants_reload = False

    def __init__(self, probe: Probe, kept: Kept) -> None:
        self._probe = probe
        self._kept = kept
        self.asked_s = 0.0

    @property
    def stop_requested(self) -> bool:
        if self._kept.view is None or not self._kept.view.engines:
            return False
        if not self.asked_s:
            self._serve("last")
            self.asked_s = time.monotonic()
        return True

    def _serve(self, name: str) -> None:
        probe, now_ns = self._probe, time.monotonic_ns()
        index = probe.queued(name, prompt_tokens=8)
        probe.admitted(index)
        probe.plan(0, start_ns=now_ns, end_ns=now_ns, waiting=0, running=1)
        probe.start(0)
        probe.stop(0)
        probe.slices(0, requests=[index], phases=[PREFILL], tokens=[8], contexts=[0], sampled=[1])
        probe.emitted([index], [1], step=0)
        probe.finished(index, "stop")


def test_what_ended_before_the_collector_was_asked_to_end_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    config = read_config(None, {"INFERSCOPE_COLLECT_PINS_FOLDER": str(tmp_path / "pins")})
    kept = Kept()
    exporter_set = ExporterSet({"kept": kept}, log_line=lambda _: None)
    exporter_set.open()
    probe = Probe.open(EngineInfo(0, "made-up"))
    try:
        flags = LastMinute(probe, kept)
        service = Service(config, exporter_set, clock=SystemClock(), log_line=lambda _: None)
        assert service.run(flags)
        took_s = time.monotonic() - flags.asked_s
    finally:
        probe.close()
    assert [request.request_id for request in kept.requests] == ["last"]
    assert kept.view is not None
    (view,) = kept.view.engines
    assert view.num_finished == 1
    assert kept.is_closed
    assert took_s < 30


class Restless:
    """Asks for the end at once, and ends the engine a while later."""

    wants_pin = wants_reload = False

    def __init__(self, probe: Probe, kept: Kept) -> None:
        self._probe = probe
        self._kept = kept
        self.gone_s = 0.0

    @property
    def stop_requested(self) -> bool:
        if self._kept.view is None or not self._kept.view.engines:
            return False
        self._probe.close()
        self.gone_s = time.monotonic()
        return True


@pytest.mark.thorough
def test_it_outlives_the_engines_by_what_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    config = read_config(
        None,
        {
            "INFERSCOPE_COLLECT_PINS_FOLDER": str(tmp_path / "pins"),
            "INFERSCOPE_COLLECT_OUTLIVE_S": "2.5",
        },
    )
    kept = Kept()
    exporter_set = ExporterSet({"kept": kept}, log_line=lambda _: None)
    exporter_set.open()
    flags = Restless(Probe.open(EngineInfo(0, "made-up")), kept)
    assert Service(config, exporter_set, clock=SystemClock(), log_line=lambda _: None).run(flags)
    assert 2.3 < time.monotonic() - flags.gone_s < 60
    assert kept.view is not None
    (view,) = kept.view.engines
    assert not view.is_alive
