"""The reader's half: rings and recordings in, final numbers and snapshots out."""

from inferscope.fold.engine import EngineFold
from inferscope.fold.finals import (
    DeviceHealth,
    DeviceTime,
    FinalRequest,
    FinalStep,
    KvTransfer,
    PhaseWork,
    RunTotals,
    Sink,
)
from inferscope.fold.fold import READER, Collector
from inferscope.fold.join.counted import Provenance, RequestCounters
from inferscope.fold.joins import ARRIVALS_NS
from inferscope.fold.judging import Judging
from inferscope.fold.keep import ALL, Keep
from inferscope.fold.snapshots import (
    BudgetView,
    CountersView,
    EngineView,
    Health,
    PhaseUse,
    Promised,
    Quantiles,
    RequestRow,
    RunFinding,
    Running,
    Snapshot,
    SnapshotDocument,
    json_of,
)
from inferscope.fold.view import alive_row, finished_row, model_of, snapshot
from inferscope.fold.windows import SECOND_NS

__all__ = [
    "ALL",
    "ARRIVALS_NS",
    "READER",
    "SECOND_NS",
    "BudgetView",
    "Collector",
    "CountersView",
    "DeviceHealth",
    "DeviceTime",
    "EngineFold",
    "EngineView",
    "FinalRequest",
    "FinalStep",
    "Health",
    "Judging",
    "Keep",
    "KvTransfer",
    "PhaseUse",
    "PhaseWork",
    "Promised",
    "Provenance",
    "Quantiles",
    "RequestCounters",
    "RequestRow",
    "RunFinding",
    "RunTotals",
    "Running",
    "Sink",
    "Snapshot",
    "SnapshotDocument",
    "alive_row",
    "finished_row",
    "json_of",
    "model_of",
    "snapshot",
]
