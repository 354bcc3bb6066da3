"""A PM sampling session on one device, and the metrics that its chip counts in one pass.

    metrics ─► config image (one pass) ─► enable, configure, start ─► decode … decode ─► stop

CUPTI reads the config image throughout the session. Decoding fills an image of windows, which is
evaluated window by window and then blanked.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Container, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from inferscope.records import AMOUNTS, CounterSample
from inferscope.sampler.cupti import layout
from inferscope.sampler.cupti.image import CounterDataImage
from inferscope.sampler.cupti.library import Cupti, CuptiError
from inferscope.sampler.source import Unavailable

_PERCENT = ".avg.pct_of_peak_sustained_elapsed"
_CANDIDATES: dict[str, tuple[str, ...]] = {
    "dram_read_bytes": ("dram__bytes_read.sum", "dram__bytes_op_read.sum"),
    "dram_write_bytes": ("dram__bytes_write.sum", "dram__bytes_op_write.sum"),
    "sm_active_share": (f"sm__cycles_active{_PERCENT}",),
    "busy_share": (f"gr__cycles_active{_PERCENT}",),
    "dram_share": (f"dram__throughput{_PERCENT}",),
    "tensor_share": (f"sm__pipe_tensor_cycles_active{_PERCENT}",),
    "gpc_clock_mhz": ("gpc__cycles_elapsed.avg.per_second",),
    "sys_clock_mhz": ("sys__cycles_elapsed.avg.per_second",),
    "dram_clock_mhz": ("dram__cycles_elapsed.avg.per_second",),
    "pcie_read_bytes": ("pcie__read_bytes.sum",),
    "pcie_write_bytes": ("pcie__write_bytes.sum",),
    "nvlink_receive_bytes": ("nvlrx__bytes.sum",),
    "nvlink_send_bytes": ("nvltx__bytes.sum",),
    "l2_sectors": ("lts__t_sectors.sum",),
}
"""Metric names by key of COUNTERS; the second name is that of Blackwell GB20x. Ordered by
importance: if a chip cannot count all in one pass, later metrics are omitted."""
IN_WINDOWS = (
    "dram_read_bytes", "dram_write_bytes", "sm_active_share", "busy_share", "dram_share",
    "tensor_share",
)  # fmt: skip
"""Values recorded per window, to be joined to steps. The others are recorded per decode: as columns
they would more than double the bytes that the sampler writes."""

_HARDWARE_BUFFER_BYTES, _LONG_INTERVAL_NS = 64 << 20, 500_000
_MOST_BUFFER_BYTES = 512 << 20
"""Device's buffer for windows of 500 µs or longer, and the largest one for shorter windows."""
_IMAGE_NS = 2_000_000_000
"""Time span in nanoseconds whose windows fit the image; windows beyond it lack timestamps."""
_LEAST_SAMPLES = 64
_MOST_DECODES = 16
_SYSCLK_PER_NS = 1.0
"""Approximate cycles per nanosecond of a variable clock; windows carry their true length."""


class Metrics(NamedTuple):
    """The metrics that a chip counts in one pass."""

    by_word: dict[str, str]
    config: Any
    """Config image, which CUPTI reads throughout the session."""


class Windows(NamedTuple):
    """Decoded windows with wall-clock stamps, and a row of values for each."""

    starts_ns: list[int]
    ends_ns: list[int]
    rows: list[list[float]]
    """Values in CUPTI's units, one row per window."""


class Decoded(NamedTuple):
    """Result of one decode."""

    windows: Windows
    has_overflowed: bool
    """Whether the device's buffer was full, so that windows were overwritten."""
    num_unstamped: int
    """Number of windows without timestamps, because the image was full before them."""


class Session:
    """A PM sampling session on one device.

    Attributes:
        uuid: UUID of the device.
    """

    def __init__(self, cupti: Cupti, ordinal: int, uuid: str, *, interval_ns: int) -> None:
        """Configure and start the session.

        Raises:
            CuptiError: a CUPTI call failed.
            Unavailable: the chip counts none of our metrics in one pass.
        """
        self.uuid = uuid
        self._cupti = cupti
        self._interval_ns = interval_ns
        self._sampler: int | None = None
        self._host: int | None = None
        self._is_first = True
        self._last_end_ns: int | None = None
        self._offset_ns: int | None = None
        self._num_unstamped = 0
        """Number of windows without timestamps that no sample has counted as lost yet."""
        self._num_in_gap = 0
        """Number of windows counted as lost that belong to the gap before the next window."""
        try:
            self._begin(ordinal)
        except BaseException:  # an enabled session would keep the counters
            self.close()
            raise

    def facts(self) -> dict[str, str]:
        """Return the session's properties."""
        lacking = missing(self._metrics)
        properties = {
            "chip": self._chip,
            "interval_ns": str(self._interval_ns),
            "cupti": f"{self._cupti.version} {self._cupti.path}",
            "counted": " ".join(sorted(self._metrics.by_word)),
        }
        if lacking:
            properties["missing"] = " ".join(lacking)
        return properties

    def decode(self) -> Decoded:
        """Return the windows completed since the last decode, and the losses.

        Raises:
            CuptiError: a CUPTI call failed.
        """
        windows, has_overflowed, num_unstamped = Windows([], [], []), False, 0
        image = self._image
        for _ in range(_MOST_DECODES):
            params = layout.Decode(
                pPmSamplingObject=self._sampler,
                pCounterDataImage=image.at,
                counterDataImageSize=image.size,
            )
            self._cupti.call("cuptiPmSamplingDecodeData", params)
            has_overflowed |= bool(params.overflow)
            num_unstamped += self._take(windows)
            image.blank()
            if params.decodeStopReason != layout.STOPPED_FULL:
                break
        self._num_unstamped += num_unstamped
        return Decoded(windows, has_overflowed, num_unstamped)

    def sample(self, windows: Windows, offset_ns: int, *, source: str) -> CounterSample | None:
        """Return all windows as one sample; None if there are none.

        Args:
            windows: windows of the last decode.
            offset_ns: wall clock minus monotonic clock, which converts their stamps approximately.
            source: name of the sample's source.
        """
        if not windows.rows:
            return None
        starts_ns = [start_ns - offset_ns for start_ns in windows.starts_ns]
        ends_ns = [end_ns - offset_ns for end_ns in windows.ends_ns]
        columns = {
            word: _scaled(word, column)
            for word, column in zip(
                self._metrics.by_word, zip(*windows.rows, strict=True), strict=True
            )
        }
        values = whole(columns, starts_ns, ends_ns)
        values["num_dropped"] = float(self._dropped(starts_ns, ends_ns, offset_ns))
        return CounterSample(
            ends_ns[-1],
            self.uuid,
            starts_ns[0],
            ends_ns[-1],
            source,
            values,
            starts_ns=array("q", starts_ns).tobytes(),
            ends_ns=array("q", ends_ns).tobytes(),
            series={
                word: array("f", column).tobytes()
                for word, column in columns.items()
                if word in IN_WINDOWS
            },
            real_offset_ns=offset_ns,
        )

    def close(self) -> None:
        """Stop and disable sampling; safe to call twice and after a failed start."""
        sampler, self._sampler = self._sampler, None
        host, self._host = self._host, None
        if sampler is not None:
            for function, params in (
                ("cuptiPmSamplingStop", layout.Stop(pPmSamplingObject=sampler)),
                ("cuptiPmSamplingDisable", layout.Disable(pPmSamplingObject=sampler)),
            ):
                with suppress(CuptiError):
                    self._cupti.call(function, params)
        if host is not None:
            with suppress(CuptiError):
                close_host(self._cupti, host)

    def _begin(self, ordinal: int) -> None:
        cupti = self._cupti
        self._chip = chip_name(cupti, ordinal)
        self._availability = _availability(cupti, ordinal)  # the host object keeps reading it
        metrics = choose_metrics(cupti, self._chip, self._availability)

        enable = layout.Enable(deviceIndex=ordinal)
        cupti.call("cuptiPmSamplingEnable", enable)
        self._sampler = enable.pPmSamplingObject
        self._metrics = self._configure(metrics)
        names = _names(self._metrics.by_word.values())
        self._host = open_host(cupti, self._chip, self._availability)
        _add(cupti, self._host, names)
        size = layout.DataSize(
            pPmSamplingObject=self._sampler,
            pMetricNames=names,
            numMetrics=len(names),
            maxSamples=most_samples(self._interval_ns),
        )
        cupti.call("cuptiPmSamplingGetCounterDataSize", size)
        num_bytes = size.counterDataSize

        def initialize(at: int) -> None:
            params = layout.DataInitialize(
                pPmSamplingObject=self._sampler, counterDataSize=num_bytes, pCounterData=at
            )
            cupti.call("cuptiPmSamplingCounterDataImageInitialize", params)

        self._image = image = CounterDataImage(num_bytes, initialize)
        self._values = (ctypes.c_double * len(names))()
        self._window = layout.HostEvaluate(
            pHostObject=self._host,
            pCounterDataImage=image.at,
            counterDataImageSize=image.size,
            ppMetricNames=names,
            numMetrics=len(names),
            pMetricValues=self._values,
        )
        self._evaluate = cupti.repeated("cuptiProfilerHostEvaluateToGpuValues", self._window)
        self._place = layout.SampleInfo(
            pPmSamplingObject=self._sampler,
            pCounterDataImage=image.at,
            counterDataImageSize=image.size,
        )
        self._locate = cupti.repeated("cuptiPmSamplingCounterDataGetSampleInfo", self._place)
        cupti.call("cuptiPmSamplingStart", layout.Start(pPmSamplingObject=self._sampler))

    def _configure(self, metrics: Metrics) -> Metrics:
        """Configure the session; return the metrics that the device accepts.

        A device can refuse a set whose single pass was computed on the host. Half of it is then
        tried, as often as needed.
        """
        cupti, mode = self._cupti, layout.trigger(self._chip)
        per_ns = 1.0 if mode == layout.TRIGGER_TIME else _SYSCLK_PER_NS
        while True:
            code = cupti.call(
                "cuptiPmSamplingSetConfig",
                layout.SetConfig(
                    pPmSamplingObject=self._sampler,
                    configSize=len(metrics.config),
                    pConfig=_address(metrics.config),
                    hardwareBufferSize=hardware_buffer_bytes(self._interval_ns),
                    samplingInterval=round(self._interval_ns * per_ns),
                    triggerMode=mode,
                    hwBufferAppendMode=layout.KEEP_LATEST,
                ),
                allowed=(layout.ERROR_NOT_SUPPORTED,) if len(metrics.by_word) > 1 else (),
            )
            if code == layout.SUCCESS:
                return metrics
            kept = list(metrics.by_word.items())[: len(metrics.by_word) // 2]
            metrics = choose_metrics(cupti, self._chip, self._availability, among=dict(kept))

    def _take(self, windows: Windows) -> int:
        """Append the image's windows to `windows`; return how many lack timestamps.

        The session's first window started before the session and is omitted.
        """
        filled = layout.DataInfo(
            pCounterDataImage=self._image.at, counterDataImageSize=self._image.size
        )
        self._cupti.call("cuptiPmSamplingGetCounterDataInfo", filled)
        at, locate, window, evaluate = self._place, self._locate, self._window, self._evaluate
        num_unstamped = 0
        for place in range(filled.numCompletedSamples):
            if self._is_first:
                self._is_first = False
                continue
            at.sampleIndex = place
            locate()
            start_ns, end_ns = at.startTimestamp, at.endTimestamp
            if end_ns <= start_ns:
                num_unstamped += not start_ns
                continue
            windows.starts_ns.append(start_ns)
            windows.ends_ns.append(end_ns)
            window.rangeIndex = place
            evaluate()
            windows.rows.append(self._values[:])
        return num_unstamped

    def _dropped(self, starts_ns: list[int], ends_ns: list[int], offset_ns: int) -> int:
        """Return the number of lost windows: those without timestamps and those missing in gaps.

        A window without timestamps leaves a gap before the next one; it is counted once.
        """
        num_unstamped, self._num_unstamped = self._num_unstamped, 0
        before_ns, self._offset_ns = self._offset_ns, offset_ns
        if before_ns is not None and abs(offset_ns - before_ns) > self._interval_ns:
            # The wall clock was set, so an apparent gap may not be one.
            self._last_end_ns, self._num_in_gap = None, 0
            return num_unstamped
        num_in_gaps, last_ns = 0, self._last_end_ns
        for start_ns, end_ns in zip(starts_ns, ends_ns, strict=True):
            if last_ns is not None and start_ns - last_ns > self._interval_ns // 2:
                num_in_gaps += round((start_ns - last_ns) / self._interval_ns)
            last_ns = end_ns
        self._last_end_ns = last_ns
        num_in_gaps = max(0, num_in_gaps - self._num_in_gap)
        self._num_in_gap = max(0, num_unstamped - num_in_gaps)
        return max(num_in_gaps, num_unstamped)


def hardware_buffer_bytes(interval_ns: int) -> int:
    """Return the size of the device's buffer, which holds as much time at shorter intervals."""
    shorter_by = max(1.0, _LONG_INTERVAL_NS / interval_ns)
    return min(_MOST_BUFFER_BYTES, round(_HARDWARE_BUFFER_BYTES * shorter_by))


def most_samples(interval_ns: int) -> int:
    """Return the number of windows of `interval_ns` that the image holds: two seconds of them."""
    return max(_LEAST_SAMPLES, -(-_IMAGE_NS // interval_ns))


def whole(
    columns: dict[str, tuple[float, ...]], starts_ns: list[int], ends_ns: list[int]
) -> dict[str, float]:
    """Return the values over all windows: sums of amounts, time-weighted means of shares."""
    lengths_ns = [end_ns - start_ns for start_ns, end_ns in zip(starts_ns, ends_ns, strict=True)]
    total_ns = sum(lengths_ns)
    values = {}
    for word, column in columns.items():
        if word in AMOUNTS:
            values[word] = sum(column)
        else:
            weighed = (n * length for n, length in zip(column, lengths_ns, strict=True))
            values[word] = sum(weighed) / total_ns
    return values


def open_host(cupti: Cupti, chip: str, availability: Any) -> int:
    """Return a CUPTI host object with a chip's metrics; it needs no device."""
    params = cupti.HostInitialize(
        profilerType=layout.PROFILER_TYPE_PM_SAMPLING,
        pChipName=chip.encode(),
        pCounterAvailabilityImage=None if availability is None else _address(availability),
    )
    cupti.call("cuptiProfilerHostInitialize", params)
    host: int = params.pHostObject
    return host


def close_host(cupti: Cupti, host: int) -> None:
    """Release a CUPTI host object."""
    cupti.call("cuptiProfilerHostDeinitialize", layout.HostDeinitialize(pHostObject=host))


def choose_metrics(
    cupti: Cupti, chip: str, availability: Any, *, among: Container[str] = _CANDIDATES
) -> Metrics:
    """Return the chip's metrics, as many as it counts in one pass.

    Args:
        cupti: library.
        chip: its name of the chip.
        availability: image of the device's available counters; None assumes all.
        among: keys of COUNTERS to choose from.

    Raises:
        Unavailable: the chip counts none of them.
        CuptiError: the library does not support the chip.
    """
    wanted = {word: names for word, names in _CANDIDATES.items() if word in among}
    at_once = {word: candidates[0] for word, candidates in wanted.items()}
    found = _config(cupti, chip, availability, list(at_once.values()))
    if found is not None and found[1] == 1:
        return Metrics(at_once, found[0])
    metrics = Metrics({}, None)
    for word, candidates in wanted.items():
        for name in candidates:
            found = _config(cupti, chip, availability, [*metrics.by_word.values(), name])
            if found is not None and found[1] == 1:
                metrics = Metrics({**metrics.by_word, word: name}, found[0])
                break
    if not metrics.by_word:
        raise Unavailable(f"CUPTI has no metric of {chip} that PM sampling can count.")
    return metrics


def missing(metrics: Metrics) -> list[str]:
    """Return the keys of COUNTERS that a chip does not count in one pass."""
    return sorted(_CANDIDATES.keys() - metrics.by_word.keys())


def chip_name(cupti: Cupti, ordinal: int) -> str:
    """Return CUPTI's name of a device's chip.

    Raises:
        CuptiError: there is no such device.
    """
    named = layout.GetChipName(deviceIndex=ordinal)
    cupti.call("cuptiDeviceGetChipName", named)
    chip: str = named.pChipName.decode("ascii", "replace")
    return chip


def _config(cupti: Cupti, chip: str, availability: Any, names: list[str]) -> tuple[Any, int] | None:
    """Return the config image of metrics and its number of passes; None if the chip lacks one."""
    host = open_host(cupti, chip, availability)
    try:
        try:
            _add(cupti, host, _names(names))
        except CuptiError:
            return None
        size = layout.HostConfigSize(pHostObject=host)
        cupti.call("cuptiProfilerHostGetConfigImageSize", size)
        config = ctypes.create_string_buffer(size.configImageSize)
        cupti.call(
            "cuptiProfilerHostGetConfigImage",
            layout.HostConfig(
                pHostObject=host, configImageSize=len(config), pConfigImage=_address(config)
            ),
        )
        passes = layout.HostPasses(configImageSize=len(config), pConfigImage=_address(config))
        cupti.call("cuptiProfilerHostGetNumOfPasses", passes)
        return config, passes.numOfPasses
    finally:
        close_host(cupti, host)


def _availability(cupti: Cupti, ordinal: int) -> Any:
    """Return CUPTI's image of the counters that the device can provide now."""
    params = layout.Availability(deviceIndex=ordinal)
    cupti.call("cuptiPmSamplingGetCounterAvailability", params)
    image = ctypes.create_string_buffer(params.counterAvailabilityImageSize)
    params.pCounterAvailabilityImage = _address(image)
    cupti.call("cuptiPmSamplingGetCounterAvailability", params)
    return image


def _add(cupti: Cupti, host: int | None, names: ctypes.Array[ctypes.c_char_p]) -> None:
    cupti.call(
        "cuptiProfilerHostConfigAddMetrics",
        layout.HostAddMetrics(pHostObject=host, ppMetricNames=names, numMetrics=len(names)),
    )


def _names(names: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [name.encode() for name in names]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _address(buffer: Any) -> int:
    return ctypes.addressof(buffer)


def _scaled(word: str, column: tuple[float, ...]) -> tuple[float, ...]:
    """Return a metric's values in our units: amounts unchanged, percent as share, Hz as MHz."""
    if word in AMOUNTS:
        return column
    divisor = 1e6 if word.endswith("_mhz") else 100.0
    return tuple(number / divisor for number in column)
