"""Families as a page, in the text format and in OpenMetrics, which alone carries exemplars.

The client library's own encoder formats each bucket of each histogram anew; here a series' labels
are written once for all of its buckets.
"""

from __future__ import annotations

import gzip
import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache

from prometheus_client.core import Metric

from inferscope_prometheus.engine_counters import DurationHistogram, Exemplar

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
MOST_LABEL = 256
"""Maximum of characters of a label's value; names of pods have up to 253."""
_DIGITS = 12
_LEVEL = 1
"""Of compression: a level higher takes three times as long for a tenth of the bytes."""


class HistogramFamily(Metric):
    """A family of histograms that all have the same bounds."""

    def __init__(
        self, name: str, says: str, *, labels: tuple[str, ...], bounds_s: tuple[float, ...]
    ) -> None:
        """Start without a series."""
        super().__init__(name, says, "histogram")
        self._label_names = labels
        self._bounds = (*map(str, bounds_s), "+Inf")
        self._rows: list[tuple[tuple[str, ...], DurationHistogram, int]] = []

    def add(self, labels: tuple[str, ...], histogram: DurationHistogram, offset_ns: int) -> None:
        """Add a series.

        Args:
            labels: their values.
            histogram: nobody adds to it any more.
            offset_ns: wall clock less the clock of its exemplars.
        """
        self._rows.append((labels, histogram, offset_ns))

    def num_series(self) -> dict[str, int]:
        """Return the number of series by engine."""
        at, num_each = self._label_names.index("engine_id"), len(self._bounds) + 2
        found: Counter[str] = Counter()
        for labels, _, _ in self._rows:
            found[labels[at]] += num_each
        return found

    def leave_out(self, engine_ids: Collection[str]) -> None:
        """Drop the series of these engines."""
        at = self._label_names.index("engine_id")
        self._rows = [row for row in self._rows if row[0][at] not in engine_ids]

    def lines(self, *, is_open: bool) -> Iterator[str]:
        """Return its series' lines."""
        for labels, histogram, offset_ns in self._rows:
            told = _labels(dict(zip(self._label_names, labels, strict=True)))
            start, num = f'{self.name}_bucket{{{told},le="', 0
            exemplars = histogram.exemplars if is_open else {}
            for at, (bound, count) in enumerate(zip(self._bounds, histogram.counts, strict=True)):
                num += count
                line = f'{start}{bound}"}} {num}.0'
                found = exemplars.get(at)
                yield line if found is None else line + _exemplar(found, offset_ns)
            yield f"{self.name}_count{{{told}}} {num}.0"
            yield f"{self.name}_sum{{{told}}} {histogram.sum_ns / 1e9!r}"


def page(families: Iterable[Metric], *, is_open: bool) -> bytes:
    """Return a page.

    Args:
        families: ours, or any of the client library's.
        is_open: as OpenMetrics.
    """
    lines: list[str] = []
    for family in families:
        is_counter = family.type == "counter"
        name = f"{family.name}_total" if is_counter and not is_open else family.name
        lines.append(f"# HELP {name} {_escaped_help(family.documentation, is_open=is_open)}")
        lines.append(f"# TYPE {name} {family.type}")
        if isinstance(family, HistogramFamily):
            lines += family.lines(is_open=is_open)
            continue
        for sample in family.samples:
            lines.append(f"{sample.name}{{{_labels(sample.labels)}}} {_number(sample.value)}")
    if is_open:
        lines.append("# EOF")
    return ("\n".join(lines) + "\n").encode()


def wants_open(accept: str) -> bool:
    """Tell whether whoever asks, asks for OpenMetrics; Prometheus prefers it."""
    return any(
        each.split(";")[0].strip() == "application/openmetrics-text" for each in accept.split(",")
    )


def takes_gzip(accept_encoding: str) -> bool:
    """Tell whether whoever asks, takes compressed pages."""
    return any(each.split(";")[0].strip().lower() == "gzip" for each in accept_encoding.split(","))


def compressed(body: bytes) -> bytes:
    """Return a page compressed."""
    return gzip.compress(body, _LEVEL)


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join([f'{name}="{_escaped(value)}"' for name, value in labels.items()])


@lru_cache(4096)
def _escaped(value: str) -> str:
    """Return a label's value, cut if it is long; two long values stay two."""
    if len(value) > MOST_LABEL:
        digits = hashlib.sha256(value.encode()).hexdigest()[:_DIGITS]
        value = f"{value[: MOST_LABEL - _DIGITS - 1]}-{digits}"
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _escaped_help(says: str, *, is_open: bool) -> str:
    says = says.replace("\\", r"\\").replace("\n", r"\n")
    return says.replace('"', r"\"") if is_open else says


def _number(value: float) -> str:
    text = repr(float(value))
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text, text)


def _exemplar(exemplar: Exemplar, offset_ns: int) -> str:
    trace_id, duration_ns, at_ns = exemplar
    at_s = f"{(at_ns + offset_ns) / 1e9:.3f}"
    return f' # {{trace_id="{trace_id}"}} {duration_ns / 1e9!r} {at_s}'
