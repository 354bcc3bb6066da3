"""The probe: the only API between an engine and InferScope."""

from inferscope.probe.cache_watch import CacheWatch
from inferscope.probe.clock import Clock, SystemClock
from inferscope.probe.columns import column, digest64
from inferscope.probe.cuda_events import TorchEvents
from inferscope.probe.deferred import Deferred
from inferscope.probe.events import NO_REQUEST
from inferscope.probe.forked_locks import forked_lock
from inferscope.probe.headers import HASH, WORDS, AllowedHeaders
from inferscope.probe.host_log import note, warn
from inferscope.probe.identity import ENGINE_ID_VARIABLE, engine_id
from inferscope.probe.ids import digits
from inferscope.probe.log import KEYFRAME_NS
from inferscope.probe.marks import Marks
from inferscope.probe.opening import make_ring
from inferscope.probe.part_labels import HEADER, Labels, Parts, bounded, is_name
from inferscope.probe.phases import split_phases
from inferscope.probe.probe import LEAST_BLOCKED_NS, Probe
from inferscope.probe.requests import MAX_LIVE
from inferscope.probe.server_address import server_place
from inferscope.probe.timers import EventTimer, HostTimer, StepTimer
from inferscope.records import EngineInfo, Shape

__all__ = [
    "ENGINE_ID_VARIABLE",
    "HASH",
    "HEADER",
    "KEYFRAME_NS",
    "LEAST_BLOCKED_NS",
    "MAX_LIVE",
    "NO_REQUEST",
    "WORDS",
    "AllowedHeaders",
    "CacheWatch",
    "Clock",
    "Deferred",
    "EngineInfo",
    "EventTimer",
    "HostTimer",
    "Labels",
    "Marks",
    "Parts",
    "Probe",
    "Shape",
    "StepTimer",
    "SystemClock",
    "TorchEvents",
    "bounded",
    "column",
    "digest64",
    "digits",
    "engine_id",
    "forked_lock",
    "is_name",
    "make_ring",
    "note",
    "server_place",
    "split_phases",
    "warn",
]
