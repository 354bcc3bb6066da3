"""The reader's half: rings and recordings in, final numbers and snapshots out."""

from inferscope.fold.cache_accounts import CacheAccounts
from inferscope.fold.cache_use import CacheUse, RequestName
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
from inferscope.fold.miss_ratio import Curve, CurvePoint
from inferscope.fold.retention import ALL, FOR_SCREEN, Retention
from inferscope.fold.slo_sink import Judging
from inferscope.fold.snapshots import (
    BIN_EDGES_NS,
    BudgetView,
    CacheView,
    CollectorInfo,
    CountersView,
    DeviceCounters,
    EngineView,
    ExpertsView,
    Health,
    KindSums,
    LevelTrial,
    LevelWindow,
    ObjectiveLevels,
    PhaseUse,
    Quantiles,
    RequestRow,
    RunFinding,
    ServiceLevels,
    SloState,
    Snapshot,
    SnapshotDocument,
    StepView,
    WorstRequest,
    json_of,
)
from inferscope.fold.view import alive_row, finished_row, model_of, snapshot
from inferscope.fold.windows import SECOND_NS

__all__ = [
    "ALL",
    "ARRIVALS_NS",
    "BIN_EDGES_NS",
    "FOR_SCREEN",
    "READER",
    "SECOND_NS",
    "BudgetView",
    "CacheAccounts",
    "CacheUse",
    "CacheView",
    "Collector",
    "CollectorInfo",
    "CountersView",
    "Curve",
    "CurvePoint",
    "DeviceCounters",
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
    "KindSums",
    "KvTransfer",
    "LevelTrial",
    "LevelWindow",
    "ObjectiveLevels",
    "PhaseUse",
    "PhaseWork",
    "Provenance",
    "Quantiles",
    "RequestCounters",
    "RequestName",
    "RequestRow",
    "Retention",
    "RunFinding",
    "RunTotals",
    "ServiceLevels",
    "Sink",
    "SloState",
    "Snapshot",
    "SnapshotDocument",
    "StepView",
    "WorstRequest",
    "add_durations",
    "alive_row",
    "finished_row",
    "json_of",
    "model_of",
    "snapshot",
]
