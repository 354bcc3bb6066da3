"""The reader's half: rings and recordings in, final numbers and snapshots out."""

from inferscope.fold.durations import add_durations
from inferscope.fold.engine import EngineFold
from inferscope.fold.expert_load import ExpertLoads
from inferscope.fold.final_records import (
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
from inferscope.fold.join.request_counters import Provenance, RequestCounters
from inferscope.fold.joins import ARRIVALS_NS
from inferscope.fold.retention import ALL, FOR_SCREEN, Retention
from inferscope.fold.slo_sink import Judging
from inferscope.fold.snapshots import (
    BudgetView,
    CollectorInfo,
    CountersView,
    EngineView,
    ExpertsView,
    Health,
    PhaseUse,
    Quantiles,
    RequestRow,
    RunFinding,
    SloState,
    Snapshot,
    SnapshotDocument,
    json_of,
)
from inferscope.fold.view import alive_row, finished_row, model_of, snapshot
from inferscope.fold.windows import SECOND_NS

__all__ = [
    "ALL",
    "ARRIVALS_NS",
    "FOR_SCREEN",
    "READER",
    "SECOND_NS",
    "BudgetView",
    "Collector",
    "CollectorInfo",
    "CountersView",
    "DeviceHealth",
    "DeviceTime",
    "EngineFold",
    "EngineView",
    "ExpertLoads",
    "ExpertsView",
    "FinalRequest",
    "FinalStep",
    "Health",
    "Judging",
    "KvTransfer",
    "PhaseUse",
    "PhaseWork",
    "Provenance",
    "Quantiles",
    "RequestCounters",
    "RequestRow",
    "Retention",
    "RunFinding",
    "RunTotals",
    "Sink",
    "SloState",
    "Snapshot",
    "SnapshotDocument",
    "add_durations",
    "alive_row",
    "finished_row",
    "json_of",
    "model_of",
    "snapshot",
]
