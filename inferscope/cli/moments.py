"""Times on the command line: so long ago, so far into the records, or by the clock on the wall."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from inferscope.ring.extent import Extent

_UNITS_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|min|[smhd]?)")
_DURATION = re.compile(rf"(?:{_PART.pattern})+")
_CLOCK = re.compile(r"\d{1,2}:\d\d(:\d\d(\.\d+)?)?")
_NS = 1_000_000_000


@dataclass(frozen=True)
class Moment:
    """A time as the user gave it; what it means depends on what is read."""

    text: str
    after_start_ns: int | None = None
    before_end_ns: int | None = None
    clock: datetime | None = None
    """Without a date if `is_of_day`."""
    is_of_day: bool = False

    def real_ns(self, extent: Extent) -> int:
        """Return the wall time.

        Args:
            extent: of what is read; for a living engine it ends now.
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


def accept_minus(parser: argparse.ArgumentParser) -> None:
    """Let options take `-5m` as a value, which argparse knows for `-5` alone."""
    parser._negative_number_matcher = re.compile(r"-\.?\d")


def ago(text: str) -> Moment:
    """Read a time for argparse; a bare duration is so long before the end: `5m`, `-5m`.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    return _moment(text, is_ago=True)


def into(text: str) -> Moment:
    """Read a time for argparse; a bare duration is so far after the start: `90`, `+1m30s`.

    Raises:
        argparse.ArgumentTypeError: it is none.
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
        f"{text!r} is no time. Write -5m, 1h30m, 14:02, 14:02:07 or 2026-01-31T14:02"
    )
