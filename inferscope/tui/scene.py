"""What is on screen at one moment: a snapshot and how the user has chosen to look at it."""

from __future__ import annotations

from dataclasses import dataclass

from inferscope.collector.snapshot import EngineView, RequestRow, Snapshot
from inferscope.tui.panels.phases import Unit

WINDOWS_NS = (10_000_000_000, 60_000_000_000, 300_000_000_000)
REFRESH_RATES_HZ = (1.0, 2.0, 4.0, 10.0)


@dataclass(frozen=True)
class Scene:
    """A snapshot and the way to look at it; every panel is a function of a scene and a size."""

    snapshot: Snapshot | None = None
    title: str = ""
    status: str = ""
    """What the source does as long as it has no snapshot."""
    engine_idx: int = 0
    window_ns: int = WINDOWS_NS[1]
    refresh_hz: float = 4.0
    is_frozen: bool = False
    behind_ns: int = 0
    """How far a frozen snapshot lies behind the newest."""
    unit: Unit = "%"
    failure: str = ""
    """Why no newer snapshot comes."""
    message: str = ""
    """An answer to the last key, for a moment."""

    @property
    def view(self) -> EngineView | None:
        """The engine on screen."""
        if self.snapshot is None or not self.snapshot.engines:
            return None
        return self.snapshot.engines[self.engine_idx % len(self.snapshot.engines)]

    @property
    def num_engines(self) -> int:
        """How many engines the snapshot holds."""
        return len(self.snapshot.engines) if self.snapshot else 0

    def arrived_real_ns(self, row: RequestRow) -> int:
        """Give the wall time at which a request came, 0 where the snapshot knows none."""
        if self.snapshot is None or not self.snapshot.real_ns:
            return 0
        return self.snapshot.real_ns - (self.snapshot.mono_ns - row.arrived_ns)
