"""State of the screen at one time: a snapshot and the chosen view of it."""

from __future__ import annotations

from dataclasses import dataclass

from inferscope.fold import EngineView, RequestRow, Snapshot
from inferscope.text.panels.phases import Unit

WINDOWS_NS = (10_000_000_000, 60_000_000_000, 300_000_000_000)
REFRESH_RATES_HZ = (1.0, 2.0, 4.0, 10.0)


@dataclass(frozen=True)
class Scene:
    """A snapshot and view options; every panel is a function of a scene and a size."""

    snapshot: Snapshot | None = None
    title: str = ""
    status: str = ""
    """Status of a source without a snapshot."""
    engine_idx: int = 0
    window_ns: int = WINDOWS_NS[1]
    refresh_hz: float = 4.0
    is_frozen: bool = False
    behind_ns: int = 0
    """Lag of a frozen snapshot behind the newest, in ns."""
    unit: Unit = "%"
    failure: str = ""
    """Reason why no newer snapshot arrives."""
    message: str = ""
    """Short reply to the last key."""

    @property
    def view(self) -> EngineView | None:
        """Return the engine on screen."""
        if self.snapshot is None or not self.snapshot.engines:
            return None
        return self.snapshot.engines[self.engine_idx % len(self.snapshot.engines)]

    @property
    def num_engines(self) -> int:
        """Return the number of engines in the snapshot."""
        return len(self.snapshot.engines) if self.snapshot else 0

    def arrived_real_ns(self, row: RequestRow) -> int:
        """Return the wall time of a request's arrival; 0 if the snapshot has none."""
        if self.snapshot is None or not self.snapshot.real_ns:
            return 0
        return self.snapshot.real_ns - (self.snapshot.mono_ns - row.arrived_ns)
