"""Argument types for times: durations before the end or after the start, and wall-clock times."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from inferscope.ring import Extent

_UNITS_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|min|[smhd]?)")
_DURATION = re.compile(rf"(?:{_PART.pattern})+")
_CLOCK = re.compile(r"\d{1,2}:\d\d(:\d\d(\.\d+)?)?")
_NS = 1_000_000_000


@dataclass(frozen=True)
class Moment:
    """Time as given by the user; its meaning depends on the time range of the records."""

    text: str
    after_start_ns: int | None = None
    before_end_ns: int | None = None
    clock: datetime | None = None
    """Wall-clock time; without a date if `is_of_day`."""
    is_of_day: bool = False

    def real_ns(self, extent: Extent) -> int:
        """Return the wall time.

        Args:
            extent: time range of the records; for a running engine it ends now.
        """
        if self.after_start_ns is not None:
            return extent.first_real_ns + self.after_start_ns
        if self.before_end_ns is not None:
            return extent.last_real_ns - self.before_end_ns
        assert self.clock is not None
        if not self.is_of_day:
            return round(self.clock.timestamp() * _NS)
        last = datetime.fromtimestamp(extent.last_real_ns / _NS)
        found = datetime.combine(last.date(), self.clock.time())
        if found > last:
            found -= timedelta(days=1)
        return round(found.timestamp() * _NS)


def accept_negative_times(parser: argparse.ArgumentParser) -> None:
    """Make options accept values such as `-5m`; argparse accepts only `-5`."""
    parser._negative_number_matcher = re.compile(r"-\.?\d")


def since_time(text: str) -> Moment:
    """Parse a time for argparse; a duration counts back from the end: `5m`, `-5m`.

    Raises:
        argparse.ArgumentTypeError: the text is not a time.
    """
    return _moment(text, is_ago=True)


def at_time(text: str) -> Moment:
    """Parse a time for argparse; a duration counts from the start: `90`, `+1m30s`.

    Raises:
        argparse.ArgumentTypeError: the text is not a time.
    """
    return _moment(text, is_ago=False)


def _moment(text: str, *, is_ago: bool) -> Moment:
    sign, bare = (text[0], text[1:]) if text[:1] in ("-", "+") else ("", text)
    if _DURATION.fullmatch(bare):
        span_s = sum(float(num) * _UNITS_S[unit] for num, unit in _PART.findall(bare))
        if span_s < 1e9:
            span_ns = round(span_s * _NS)
            if sign == "-" or (is_ago and not sign):
                return Moment(text, before_end_ns=span_ns)
            return Moment(text, after_start_ns=span_ns)
    elif not sign:
        try:
            if _CLOCK.fullmatch(text):
                shape = "%H:%M:%S.%f" if "." in text else "%H:%M:%S"
                full = text if text.count(":") == 2 else f"{text}:00"
                return Moment(text, clock=datetime.strptime(full, shape), is_of_day=True)
            return Moment(text, clock=datetime.fromisoformat(text))
        except (ValueError, OverflowError):
            pass
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a time. Write -5m, 1h30m, 14:02, 14:02:07 or 2026-01-31T14:02"
    )
