"""dcgm-exporter's page: for devices without GPM whose profiling counters DCGM holds already.

The page states neither the time nor the window of its values, which DCGM refreshes once a second
or less often. A sample's window lies between two pages that differ; the values can lag by the
exporter's interval. The page names MIG instances by numbers that only the driver can translate,
so their rows are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from inferscope.errors import InferScopeError
from inferscope.foreign import without_secrets
from inferscope.records import CounterSample
from inferscope.sampler.source import Claimer, Unavailable, facts, sample, silence

if TYPE_CHECKING:
    from inferscope.metrics_page import MetricsPage

DEFAULT_URL = "http://127.0.0.1:9400/metrics"
_SLOWEST_NS = 1_000_000_000
_TIMEOUT_S = 2.0
_MIB = float(1 << 20)

_WORDS: dict[str, tuple[str, float]] = {
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("busy_share", 1.0),
    "DCGM_FI_PROF_SM_ACTIVE": ("sm_active_share", 1.0),
    "DCGM_FI_PROF_SM_OCCUPANCY": ("sm_occupancy_share", 1.0),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("tensor_share", 1.0),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("dram_share", 1.0),
    "DCGM_FI_DEV_MEM_COPY_UTIL": ("copy_share", 0.01),
    "DCGM_FI_DEV_POWER_USAGE": ("power_w", 1.0),
    "DCGM_FI_DEV_SM_CLOCK": ("sm_clock_mhz", 1.0),
    "DCGM_FI_DEV_MEM_CLOCK": ("memory_clock_mhz", 1.0),
    "DCGM_FI_DEV_GPU_TEMP": ("temperature_c", 1.0),
    "DCGM_FI_DEV_FB_USED": ("memory_used_bytes", _MIB),
}
_ENERGY = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION_total"
"""Energy in mJ since the driver was loaded. The page omits the suffix `_total`; the parser adds
it where the page declares a counter."""
_BLANK = 2.0**47
"""Smallest of DCGM's values that mean "not available" (dcgm_structs.h: DCGM_FP64_BLANK)."""


class DcgmSource:
    """Reader of dcgm-exporter's page.

    Attributes:
        name: "dcgm".
        period_ns: period of reads in nanoseconds, at least one second.
    """

    name = "dcgm"

    def __init__(
        self,
        claims: Claimer,
        *,
        period_ns: int,
        url: str = DEFAULT_URL,
        wanted: Sequence[str] = (),
    ) -> None:
        """Store the settings; `wanted` holds UUID prefixes, since the page's indices are DCGM's."""
        self.period_ns = max(period_ns, _SLOWEST_NS)
        self._claims = claims
        self._url = url
        self._shown = without_secrets(url)
        self._wanted = [word for word in wanted if not word.isdecimal()]
        self._ours: set[str] = set()
        self._before: dict[str, tuple[int, dict[str, float]]] = {}
        """Time of the last change and the values then, by device UUID."""

    def open(self, now_ns: int) -> list[CounterSample]:
        """Read the page and claim its devices; return their properties.

        Raises:
            Unavailable: no exporter answers, or no device on the page can be claimed.
        """
        rows = self._rows()
        states, refused = [], []
        for uuid, (name, numbers) in rows.items():
            if self._wanted and not any(uuid.startswith(word) for word in self._wanted):
                continue
            try:
                self._claims.take(uuid)
            except Unavailable as error:
                refused.append(str(error))
                states.append(silence(self.name, uuid, now_ns, str(error)))
                continue
            self._ours.add(uuid)
            self._before[uuid] = (now_ns, numbers)
            properties = {"name": name, "url": self._shown}
            if not any(word.startswith("DCGM_FI_PROF_") for word in numbers):
                properties["missing"] = (
                    "no DCGM_FI_PROF_ metrics on the page: enable them in dcgm-exporter's "
                    "counters file (-f) for SM activity and memory traffic"
                )
            states.append(facts(self.name, uuid, now_ns, properties))
        if not self._ours:
            raise Unavailable(
                " ".join(dict.fromkeys(refused))
                or f"{self._shown} lists no device that this sampler was asked to read."
            )
        return states

    def read(self, now_ns: int) -> list[CounterSample]:
        """Return a sample of each device whose values on the page have changed.

        Raises:
            Unavailable: the exporter does not answer any more.
        """
        samples = []
        for uuid, (_, numbers) in self._rows().items():
            if uuid not in self._ours:
                continue
            from_ns, before = self._before[uuid]
            if numbers == before:
                continue
            self._before[uuid] = (now_ns, numbers)
            values = {
                word: numbers[name] * scale
                for name, (word, scale) in _WORDS.items()
                if name in numbers
            }
            if numbers.get(_ENERGY, -1.0) >= before.get(_ENERGY, float("inf")):
                values["energy_uj"] = (numbers[_ENERGY] - before[_ENERGY]) * 1000
            samples.append(sample(self.name, uuid, start_ns=from_ns, end_ns=now_ns, values=values))
        return samples

    def close(self) -> None:
        """Clear the devices and their last values."""
        self._ours, self._before = set(), {}

    def _rows(self) -> dict[str, tuple[str, dict[str, float]]]:
        try:
            from inferscope.metrics_page import fetch
        except ModuleNotFoundError:
            raise Unavailable(
                'prometheus-client is missing: pip install "inferscope-llm[prometheus]"'
            ) from None
        try:
            return read_page(fetch(self._url, timeout_s=_TIMEOUT_S))
        except InferScopeError:
            raise Unavailable(
                f"no dcgm-exporter answers at {self._shown}. Start one, or set --dcgm-url."
            ) from None


def read_page(page: MetricsPage) -> dict[str, tuple[str, dict[str, float]]]:
    """Return the name and values of each whole device by UUID; unknown rows are ignored."""
    rows: dict[str, tuple[str, dict[str, float]]] = {}
    for found in page.samples:
        uuid = found.labels.get("UUID", "")
        name = _ENERGY if found.name == _ENERGY.removesuffix("_total") else found.name
        is_known = name in _WORDS or name == _ENERGY
        if not is_known or not uuid or found.labels.get("GPU_I_ID"):
            continue
        if 0 <= found.number < _BLANK:
            _, numbers = rows.setdefault(uuid, (found.labels.get("modelName", ""), {}))
            numbers[name] = found.number
    return rows
