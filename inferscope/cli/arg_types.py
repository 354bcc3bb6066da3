"""Argument types for numbers, latencies and intervals; their errors quote the rejected text."""

from __future__ import annotations

import argparse
import math
import re

MAX_VALUE = 1e9
"""Largest accepted number: as seconds, about thirty years; a larger one is a typing error."""

_SHORT = re.compile(r"(\d+(?:\.\d+)?)\s*(us|µs|ms|s|min)")
_UNITS_NS = {"us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "min": 60e9}


def above_zero(text: str) -> float:
    """Parse a number above zero for argparse.

    Raises:
        argparse.ArgumentTypeError: the text is not a number, not above zero or not finite.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= MAX_VALUE:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def option_set(text: str) -> str:
    """Return a text of options, for argparse; the command parses them."""
    return utf8(text).strip()


def utf8(text: str) -> str:
    """Return a text that is valid UTF-8, for argparse; a path given as other bytes is not.

    Raises:
        argparse.ArgumentTypeError: the text is not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(
            f"{text!a} is not UTF-8: rename the folder, or give a link to it"
        ) from None
    return text


def count(text: str) -> int:
    """Parse a whole number, at least one, for argparse.

    Raises:
        argparse.ArgumentTypeError: the text is not a whole number, or not above zero.
    """
    number = above_zero(text)
    if number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(number)


def share(text: str) -> float:
    """Parse a share, 0 to 1, for argparse.

    Raises:
        argparse.ArgumentTypeError: the text is not a number from 0 to 1.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share: give 0 to 1")
    return number


def level(text: str) -> float:
    """Parse a level of confidence for argparse.

    Raises:
        argparse.ArgumentTypeError: the text is not a number from 0.5 to below 1.
    """
    number = share(text)
    if not 0.5 <= number <= 0.9999:
        raise argparse.ArgumentTypeError(f"{text!r} is not a level: give 0.5 to 0.9999")
    return number


def latency_ns(text: str) -> int:
    """Parse a latency with its unit for argparse, and return nanoseconds.

    Raises:
        argparse.ArgumentTypeError: the text is not a time with a unit.
    """
    return _short_ns(text, "latency")


def interval_ns(text: str) -> int:
    """Parse the time between two events, with its unit, for argparse, and return nanoseconds.

    Raises:
        argparse.ArgumentTypeError: the text is not a time with a unit.
    """
    return _short_ns(text, "interval")


def _short_ns(text: str, what: str) -> int:
    found = _SHORT.fullmatch(text)
    time_ns = round(float(found[1]) * _UNITS_NS[found[2]]) if found else 0
    if not 0 < time_ns <= MAX_VALUE * 1e9:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid {what}: give one such as 500ms or 2s"
        )
    return time_ns
