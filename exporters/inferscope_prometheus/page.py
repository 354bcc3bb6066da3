"""Encoding of families as a page, in the text format and in OpenMetrics (with exemplars).

The client library's encoder formats every bucket of every histogram anew; here a series' labels are
encoded once for all of its buckets.
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
"""Maximum number of characters of a label value; pod names have up to 253."""
_DIGITS = 12
_LEVEL = 1
"""Compression level; one level higher takes three times as long for 10 % fewer bytes."""


class HistogramFamily(Metric):
    """Family of histograms with common bounds."""

    def __init__(
        self, name: str, help_text: str, *, labels: tuple[str, ...], bounds_s: tuple[float, ...]
    ) -> None:
        """Start without a series."""
        super().__init__(name, help_text, "histogram")
        self._label_names = labels
        self._bounds = (*map(str, bounds_s), "+Inf")
        self._rows: list[tuple[tuple[str, ...], DurationHistogram, int]] = []

    def add(self, labels: tuple[str, ...], histogram: DurationHistogram, offset_ns: int) -> None:
        """Add a series.

        Args:
            labels: label values.
            histogram: a histogram that is not modified any more.
            offset_ns: wall clock minus the clock of its exemplars.
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
        """Return the lines of all series."""
        for labels, histogram, offset_ns in self._rows:
            labels_text = _labels(dict(zip(self._label_names, labels, strict=True)))
            start, num = f'{self.name}_bucket{{{labels_text},le="', 0
            exemplars = histogram.exemplars if is_open else {}
            for at, (bound, count) in enumerate(zip(self._bounds, histogram.counts, strict=True)):
                num += count
                line = f'{start}{bound}"}} {num}.0'
                found = exemplars.get(at)
                yield line if found is None else line + _exemplar(found, offset_ns)
            yield f"{self.name}_count{{{labels_text}}} {num}.0"
            yield f"{self.name}_sum{{{labels_text}}} {histogram.sum_ns / 1e9!r}"


def page(families: Iterable[Metric], *, is_open: bool) -> bytes:
    """Return the encoded page.

    Args:
        families: ours, or any of the client library's.
        is_open: encode as OpenMetrics.
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
    """Return whether the client accepts OpenMetrics; Prometheus prefers it."""
    return any(
        each.split(";")[0].strip() == "application/openmetrics-text" for each in accept.split(",")
    )


def takes_gzip(accept_encoding: str) -> bool:
    """Return whether the client accepts gzip."""
    return any(each.split(";")[0].strip().lower() == "gzip" for each in accept_encoding.split(","))


def compressed(body: bytes) -> bytes:
    """Return the compressed body."""
    return gzip.compress(body, _LEVEL)


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join([f'{name}="{_escaped(value)}"' for name, value in labels.items()])


@lru_cache(4096)
def _escaped(value: str) -> str:
    """Return a label value, truncated if it is long; distinct long values stay distinct."""
    if len(value) > MOST_LABEL:
        digits = hashlib.sha256(value.encode()).hexdigest()[:_DIGITS]
        value = f"{value[: MOST_LABEL - _DIGITS - 1]}-{digits}"
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _escaped_help(help_text: str, *, is_open: bool) -> str:
    help_text = help_text.replace("\\", r"\\").replace("\n", r"\n")
    return help_text.replace('"', r"\"") if is_open else help_text


def _number(value: float) -> str:
    text = repr(float(value))
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text, text)


def _exemplar(exemplar: Exemplar, offset_ns: int) -> str:
    trace_id, duration_ns, at_ns = exemplar
    at_s = f"{(at_ns + offset_ns) / 1e9:.3f}"
    return f' # {{trace_id="{trace_id}"}} {duration_ns / 1e9!r} {at_s}'
