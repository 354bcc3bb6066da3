"""The probe: the only API between an engine and InferScope."""

from inferscope.probe.clock import Clock, SystemClock
from inferscope.probe.cuda_events import TorchEvents
from inferscope.probe.events import NO_REQUEST
from inferscope.probe.marks import Marks
from inferscope.probe.probe import LEAST_BLOCKED_NS, Probe
from inferscope.probe.timers import EventTimer, HostTimer, StepTimer
from inferscope.records import EngineInfo, Shape

__all__ = [
    "LEAST_BLOCKED_NS",
    "NO_REQUEST",
    "Clock",
    "EngineInfo",
    "EventTimer",
    "HostTimer",
    "Marks",
    "Probe",
    "Shape",
    "StepTimer",
    "SystemClock",
    "TorchEvents",
]
