"""Numbers on the command line: finite, above zero, and named in the error."""

from __future__ import annotations

import argparse
import math
import re

MOST = 1e9
"""Thirty years of seconds: beyond it somebody meant something else."""

_SHORT = re.compile(r"(\d+(?:\.\d+)?)\s*(us|µs|ms|s|min)")
_UNITS_NS = {"us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "min": 60e9}


def above_zero(text: str) -> float:
    """Read a number for argparse.

    Raises:
        argparse.ArgumentTypeError: it is none, or not above zero, or not finite.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def count(text: str) -> int:
    """Read a whole number of things, at least one, for argparse.

    Raises:
        argparse.ArgumentTypeError: it is none, or not above zero.
    """
    number = above_zero(text)
    if number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(number)


def share(text: str) -> float:
    """Read a share, 0 to 1, for argparse.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share: give 0 to 1")
    return number


def latency_ns(text: str) -> int:
    """Read a latency with its unit for argparse, and return nanoseconds.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    return _short_ns(text, "latency")


def interval_ns(text: str) -> int:
    """Read the time between two of a kind with its unit for argparse, and return nanoseconds.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    return _short_ns(text, "interval")


def _short_ns(text: str, what: str) -> int:
    found = _SHORT.fullmatch(text)
    time_ns = round(float(found[1]) * _UNITS_NS[found[2]]) if found else 0
    if not 0 < time_ns <= MOST * 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}: give one such as 500ms or 2s")
    return time_ns
