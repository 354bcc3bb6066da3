"""Objectives in one line, to be edited on a screen, and their file.

    ttft 500ms 99%, tbt 200ms 99%, availability 99.9%, goodput 95%

An item names an objective or a metric, with its threshold and its target. What an item leaves out
keeps its present value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from math import isclose

from inferscope.errors import BadInput
from inferscope.slo.objectives import LATENCIES, METRICS, Objective, Objectives

_MONTH_NS = 30 * 86_400 * 10**9
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h)")
_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")
_UNITS_NS = {"us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_FILE_UNITS = ("d", 86_400 * 10**9), ("h", 3600 * 10**9), ("m", 60 * 10**9), ("s", 10**9)


def line_of(objectives: Iterable[Objective]) -> str:
    """Return objectives as a line that `objectives_of_line` reads."""
    return ", ".join(
        " ".join(
            (
                one.name,
                *(() if one.threshold_ns is None else (_span(one.threshold_ns),)),
                f"{one.objective * 100:.10g}%",
            )
        )
        for one in objectives
    )


def objectives_of_line(text: str, present: Iterable[Objective]) -> Objectives:
    """Return the objectives of a line.

    Args:
        text: the line.
        present: objectives in force, for windows, models and what the line leaves out.

    Raises:
        BadInput: the line is not valid; the message names the item.
    """
    by_name = {one.name: one for one in present}
    read: dict[str, Objective] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, *values = item.split()
        one = _objective(item, name, values, by_name.get(name))
        if name in read:
            raise BadInput(f"{name} is there twice. Give each objective once.")
        read[name] = one
    if not read:
        raise BadInput("there is no objective. Give one, such as: ttft 500ms 99%.")
    if not any(one.metric in LATENCIES for one in read.values()):
        for one in read.values():
            if one.metric == "goodput":
                raise BadInput(
                    f"{one.name} needs a threshold to meet. Add one, such as ttft 500ms."
                )
    return Objectives(tuple(read.values()))


def file_of(objectives: Iterable[Objective]) -> str:
    """Return the text of a file of objectives."""
    lines = ["slos:"]
    for one in objectives:
        lines += [f"  - name: {one.name}", f"    metric: {one.metric}"]
        if one.threshold_ns is not None:
            lines.append(f"    threshold: {_span(one.threshold_ns)}")
        lines.append(f"    objective: {one.objective * 100:.10g}%")
        unit, size_ns = next(each for each in _FILE_UNITS if one.window_ns % each[1] == 0)
        lines.append(f"    window: {one.window_ns // size_ns}{unit}")
        if one.model is not None:
            lines.append(f"    model: {_quoted(one.model)}")
    return "\n".join(lines) + "\n"


def _objective(item: str, name: str, values: list[str], present: Objective | None) -> Objective:
    one = present
    if one is None:
        metric = next((each for each in METRICS if each == name), None)
        if metric is None:
            raise BadInput(f"{name} is not an objective. Give one of: {', '.join(METRICS)}.")
        one = Objective(name, metric, None, 0.0, _MONTH_NS)
    for value in values:
        time, share = _TIME.fullmatch(value), _SHARE.fullmatch(value)
        if time is not None and one.metric in LATENCIES:
            one = replace(one, threshold_ns=round(float(time[1]) * _UNITS_NS[time[2]]))
        elif share is not None and 0 < float(share[1]) < 100:
            wanted = float(share[1]) / 100
            one = one if isclose(wanted, one.objective) else replace(one, objective=wanted)
        elif time is not None:
            raise BadInput(f"{item!r}: {one.metric} has no threshold of its own.")
        else:
            raise BadInput(
                f"{item!r}: {value} is neither a time such as 500ms nor a share below 100%."
            )
    if one.metric in LATENCIES and not one.threshold_ns:
        raise BadInput(f"{item!r} needs a threshold, such as 500ms.")
    if not one.objective:
        raise BadInput(f"{item!r} needs a target share, such as 99%.")
    return one


def _span(span_ns: int) -> str:
    unit, size_ns = next(
        (
            (unit, size_ns)
            for unit, size_ns in (("s", 10**9), ("ms", 10**6), ("us", 10**3))
            if span_ns % size_ns == 0
        ),
        ("us", 10**3),
    )
    return f"{span_ns / size_ns:g}{unit}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
