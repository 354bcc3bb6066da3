"""The parameter structures of CUPTI and of libnvperf_host, byte for byte, as ctypes.

Each begins with its own size, and the library takes no other: not `sizeof` but the end of the last
field, without the padding behind it, in the version that is loaded. A structure that has grown in
a newer version is here once per size. From the headers of CUDA 13.0 (cupti_pmsampling.h,
cupti_profiler_host.h, cupti_profiler_target.h; nvperf_host.h and nvperf_cuda_host.h for those that
begin with Perf, and their requests); all but `HostInitialize56`, of CUDA 13.2.
"""

from __future__ import annotations

import functools
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_int,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, ClassVar

PROFILER_TYPE_PM_SAMPLING = 1
TRIGGER_SYSCLK, TRIGGER_TIME = 0, 1
"""Trigger modes: the interval counts cycles of the system clock, or nanoseconds."""
KEEP_LATEST = 1
STOPPED_FULL = 1
"""Stop reason: the image filled before the buffer was empty, so there is more to decode."""

SUCCESS = 0
ERROR_INVALID_PARAMETER = 1
ERROR_INVALID_OPERATION = 7
ERROR_OUT_OF_MEMORY = 8
ERROR_HARDWARE = 9
ERROR_MAX_LIMIT_REACHED = 12
ERROR_NOT_READY = 13
ERROR_HARDWARE_BUSY = 26
ERROR_NOT_SUPPORTED = 27
ERROR_VIRTUALIZED_NOT_SUPPORTED = 33
ERROR_INSUFFICIENT_PRIVILEGES = 35
ERROR_MULTIPLE_SUBSCRIBERS = 39
ERROR_VIRTUALIZED_PRIVILEGES = 40
ERROR_CONFIDENTIAL_COMPUTING = 41
ERROR_MIG_NOT_SUPPORTED = 43
ERROR_WSL_NOT_SUPPORTED = 45
ERROR_UNKNOWN = 999

_HEAD: list[Any] = [("structSize", c_size_t), ("pPriv", c_void_p)]
_OBJECT: list[Any] = [("pPmSamplingObject", c_void_p)]
_IMAGE: list[Any] = [("pCounterDataImage", c_void_p), ("counterDataImageSize", c_size_t)]
_METRICS: list[Any] = [("ppMetricNames", POINTER(c_char_p)), ("numMetrics", c_size_t)]


class Params(Structure):
    """A structure with its name in CUPTI's headers."""

    C_NAME: ClassVar[str]


class Initialize(Params):
    """cuptiProfilerInitialize."""

    C_NAME = "CUpti_Profiler_Initialize_Params"
    _fields_ = _HEAD


class DeInitialize(Params):
    """cuptiProfilerDeInitialize."""

    C_NAME = "CUpti_Profiler_DeInitialize_Params"
    _fields_ = _HEAD


class GetChipName(Params):
    """cuptiDeviceGetChipName."""

    C_NAME = "CUpti_Device_GetChipName_Params"
    _fields_ = [*_HEAD, ("deviceIndex", c_size_t), ("pChipName", c_char_p)]


class HostInitialize48(Params):
    """cuptiProfilerHostInitialize of CUDA 12.6 to 13.1."""

    C_NAME = "CUpti_Profiler_Host_Initialize_Params"
    _fields_ = [
        *_HEAD,
        ("profilerType", c_int),
        ("pChipName", c_char_p),
        ("pCounterAvailabilityImage", c_void_p),
        ("pHostObject", c_void_p),
    ]


class HostInitialize56(Params):
    """cuptiProfilerHostInitialize from CUDA 13.2 on."""

    C_NAME = "CUpti_Profiler_Host_Initialize_Params"
    _fields_ = [*HostInitialize48._fields_, ("pSinglePassMetricSetName", c_char_p)]


class HostDeinitialize(Params):
    """cuptiProfilerHostDeinitialize."""

    C_NAME = "CUpti_Profiler_Host_Deinitialize_Params"
    _fields_ = [*_HEAD, ("pHostObject", c_void_p)]


class HostAddMetrics(Params):
    """cuptiProfilerHostConfigAddMetrics."""

    C_NAME = "CUpti_Profiler_Host_ConfigAddMetrics_Params"
    _fields_ = [*_HEAD, ("pHostObject", c_void_p), *_METRICS]


class HostConfigSize(Params):
    """cuptiProfilerHostGetConfigImageSize."""

    C_NAME = "CUpti_Profiler_Host_GetConfigImageSize_Params"
    _fields_ = [*_HEAD, ("pHostObject", c_void_p), ("configImageSize", c_size_t)]


class HostConfig(Params):
    """cuptiProfilerHostGetConfigImage."""

    C_NAME = "CUpti_Profiler_Host_GetConfigImage_Params"
    _fields_ = [
        *_HEAD,
        ("pHostObject", c_void_p),
        ("configImageSize", c_size_t),
        ("pConfigImage", c_void_p),
    ]


class HostPasses(Params):
    """cuptiProfilerHostGetNumOfPasses."""

    C_NAME = "CUpti_Profiler_Host_GetNumOfPasses_Params"
    _fields_ = [
        *_HEAD,
        ("configImageSize", c_size_t),
        ("pConfigImage", c_void_p),
        ("numOfPasses", c_size_t),
    ]


class HostEvaluate(Params):
    """cuptiProfilerHostEvaluateToGpuValues."""

    C_NAME = "CUpti_Profiler_Host_EvaluateToGpuValues_Params"
    _fields_ = [
        *_HEAD,
        ("pHostObject", c_void_p),
        *_IMAGE,
        ("rangeIndex", c_size_t),
        *_METRICS,
        ("pMetricValues", POINTER(c_double)),
    ]


class Availability(Params):
    """cuptiPmSamplingGetCounterAvailability."""

    C_NAME = "CUpti_PmSampling_GetCounterAvailability_Params"
    _fields_ = [
        *_HEAD,
        ("deviceIndex", c_size_t),
        ("counterAvailabilityImageSize", c_size_t),
        ("pCounterAvailabilityImage", c_void_p),
    ]


class Enable(Params):
    """cuptiPmSamplingEnable."""

    C_NAME = "CUpti_PmSampling_Enable_Params"
    _fields_ = [*_HEAD, ("deviceIndex", c_size_t), *_OBJECT]


class Disable(Params):
    """cuptiPmSamplingDisable."""

    C_NAME = "CUpti_PmSampling_Disable_Params"
    _fields_ = [*_HEAD, *_OBJECT]


class Start(Params):
    """cuptiPmSamplingStart."""

    C_NAME = "CUpti_PmSampling_Start_Params"
    _fields_ = [*_HEAD, *_OBJECT]


class Stop(Params):
    """cuptiPmSamplingStop."""

    C_NAME = "CUpti_PmSampling_Stop_Params"
    _fields_ = [*_HEAD, *_OBJECT]


class SetConfig(Params):
    """cuptiPmSamplingSetConfig."""

    C_NAME = "CUpti_PmSampling_SetConfig_Params"
    _fields_ = [
        *_HEAD,
        *_OBJECT,
        ("configSize", c_size_t),
        ("pConfig", c_void_p),
        ("hardwareBufferSize", c_size_t),
        ("samplingInterval", c_uint64),
        ("triggerMode", c_int),
        ("hwBufferAppendMode", c_int),
    ]


class DataSize(Params):
    """cuptiPmSamplingGetCounterDataSize."""

    C_NAME = "CUpti_PmSampling_GetCounterDataSize_Params"
    _fields_ = [
        *_HEAD,
        *_OBJECT,
        ("pMetricNames", POINTER(c_char_p)),
        ("numMetrics", c_size_t),
        ("maxSamples", c_uint32),
        ("counterDataSize", c_size_t),
    ]


class DataInitialize(Params):
    """cuptiPmSamplingCounterDataImageInitialize."""

    C_NAME = "CUpti_PmSampling_CounterDataImage_Initialize_Params"
    _fields_ = [*_HEAD, *_OBJECT, ("counterDataSize", c_size_t), ("pCounterData", c_void_p)]


class Decode(Params):
    """cuptiPmSamplingDecodeData."""

    C_NAME = "CUpti_PmSampling_DecodeData_Params"
    _fields_ = [*_HEAD, *_OBJECT, *_IMAGE, ("decodeStopReason", c_int), ("overflow", c_uint8)]


class DataInfo(Params):
    """cuptiPmSamplingGetCounterDataInfo."""

    C_NAME = "CUpti_PmSampling_GetCounterDataInfo_Params"
    _fields_ = [
        *_HEAD,
        *_IMAGE,
        ("numTotalSamples", c_size_t),
        ("numPopulatedSamples", c_size_t),
        ("numCompletedSamples", c_size_t),
    ]


class SampleInfo(Params):
    """cuptiPmSamplingCounterDataGetSampleInfo."""

    C_NAME = "CUpti_PmSampling_CounterData_GetSampleInfo_Params"
    _fields_ = [
        *_HEAD,
        *_OBJECT,
        *_IMAGE,
        ("sampleIndex", c_size_t),
        ("startTimestamp", c_uint64),
        ("endTimestamp", c_uint64),
    ]


@functools.cache
def struct_size(kind: type[Params]) -> int:
    """Return the value that CUPTI expects in `structSize`: the offset of the last field's end."""
    last: Any = getattr(kind, kind._fields_[-1][0])
    size: int = last.offset + last.size
    return size


HostInitialize = HostInitialize48 | HostInitialize56


def host_initialize(*, has_single_pass_sets: bool) -> type[HostInitialize]:
    """Return the initialisation structure of a library, by whether it has 13.2's set function."""
    return HostInitialize56 if has_single_pass_sets else HostInitialize48


def trigger(chip: str) -> int:
    """Return the trigger mode of a chip: Turing and A100 lack the fixed-time trigger."""
    return TRIGGER_SYSCLK if chip.startswith("TU") or chip == "GA100" else TRIGGER_TIME
