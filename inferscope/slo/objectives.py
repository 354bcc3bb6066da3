"""Objectives file: a small YAML list of objectives, each for one model or for all.

    slos:
      - metric: ttft
        threshold: 500ms
        objective: 99%
        window: 30d
      - name: chat-tbt
        metric: tbt
        threshold: 200ms
        objective: 0.999
        window: 7d
        model: llama-3.1-8b
      - metric: availability
        objective: 99.9%
        window: 30d

The name defaults to the metric's. An objective with a model replaces the one of that name for all
models. `ttft`, `tbt` (every gap between tokens), `tpot` (their mean) and `e2e` (up to the last
token) have a threshold. `availability` and `goodput` have none: a request is available unless the
server failed it, and good if it is available and meets all thresholds of its model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from inferscope.document import Section, read_document
from inferscope.errors import BadInput

Metric = Literal["ttft", "tbt", "tpot", "e2e", "availability", "goodput"]
METRICS: tuple[Metric, ...] = get_args(Metric)
LATENCIES: tuple[Metric, ...] = ("ttft", "tbt", "tpot", "e2e")
"""Metrics that have a threshold."""
MOST = 100
"""Maximum number of objectives in a file: each is several time series per model and cause."""
_KEYS = ("name", "metric", "threshold", "objective", "window", "model")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")
_LEAST_WINDOW_NS = 60 * 10**9
_LONGEST_WINDOW_NS = 366 * 86400 * 10**9
_LONGEST_THRESHOLD_NS = 86400 * 10**9


@dataclass(frozen=True)
class Objective:
    """One objective for the requests of one model, or of all models."""

    name: str
    """Name of the objective, the label `slo` of its time series."""
    metric: Metric
    """Metric that the objective is about."""
    threshold_ns: int | None
    """Threshold for a single request; None for `availability` and `goodput`."""
    objective: float
    """Target share of good requests, above 0 and below 1."""
    window_ns: int
    """Window over which the share counts."""
    model: str | None = None
    """Served name of the model; None for all models without an own objective of this name."""

    def __hash__(self) -> int:
        """Return a hash of the name alone: hashing all fields takes longer than a verdict."""
        return hash(self.name)

    @property
    def budget(self) -> float:
        """Return the share of requests that may be bad."""
        return 1.0 - self.objective


@dataclass(frozen=True)
class Objectives:
    """All objectives, in file order.

    Attributes:
        all: objectives of all models; (name, model) is unique.
    """

    all: tuple[Objective, ...] = ()

    def of_model(self, model: str) -> tuple[Objective, ...]:
        """Return the objectives in force for a model: its own, and the others for all models."""
        own = {each.name for each in self.all if each.model == model}
        return tuple(
            each
            for each in self.all
            if each.model == model or (each.model is None and each.name not in own)
        )

    def excepted(self, objective: Objective) -> tuple[str, ...]:
        """Return the models that replace an objective for all models by their own."""
        if objective.model is not None:
            return ()
        models = {one.model for one in self.all if one.name == objective.name}
        return tuple(sorted(model for model in models if model is not None))


def read_objectives(path: Path) -> Objectives:
    """Read a file of objectives.

    Raises:
        BadInput: it cannot be read or is invalid: file, line and expected content.
    """
    document = read_document(path)
    document.only(("slos",))
    if "slos" not in document.settings:
        raise document.wrong("slos", "a list of objectives")
    sections = document.sections("slos")
    if not 0 < len(sections) <= MOST:
        raise BadInput(
            f"{document.settings['slos'].where}: slos has {len(sections)} objectives. "
            f"Give 1 to {MOST}."
        )
    read: list[Objective] = []
    for section in sections:
        one = _objective(section)
        for other in read:
            _check_pair(section, one, other)
        read.append(one)
    objectives = Objectives(tuple(read))
    for section, one in zip(sections, read, strict=True):
        if one.metric == "goodput":
            _check_goodput(section, one, objectives)
    return objectives


def _objective(section: Section) -> Objective:
    section.only(_KEYS)
    metric = section.word("metric", METRICS)
    if metric is None:
        raise section.wrong("metric", f"one of: {', '.join(METRICS)}")
    name = section.text("name") or metric
    if not _NAME.fullmatch(name):
        raise section.wrong("name", "up to 63 letters, digits and . _ -, a letter first")
    threshold_ns = section.duration_ns("threshold")
    if metric in LATENCIES:
        if threshold_ns is None or threshold_ns > _LONGEST_THRESHOLD_NS:
            raise section.wrong("threshold", "a time up to 1d, such as 500ms")
    elif threshold_ns is not None:
        raise section.wrong("threshold", f"none: {metric} has none of its own")
    objective = section.share("objective")
    if objective is None:
        raise section.wrong("objective", "the target share of good requests, such as 99%")
    window_ns = section.duration_ns("window")
    if window_ns is None or not _LEAST_WINDOW_NS <= window_ns <= _LONGEST_WINDOW_NS:
        raise section.wrong("window", "a time from 1m to 366d, such as 30d")
    return Objective(
        name,
        _METRIC[metric],
        threshold_ns,
        objective,
        window_ns,
        section.text("model"),
    )


_METRIC: dict[str, Metric] = {metric: metric for metric in METRICS}


def _check_pair(section: Section, one: Objective, other: Objective) -> None:
    """Reject a name that denotes two objectives."""
    if one.name != other.name:
        return
    if one.model == other.model:
        models = "all models" if one.model is None else one.model
        raise BadInput(
            f"{section.where}: {one.name} occurs twice for {models}. Give one of them another name."
        )
    if one.metric != other.metric:
        raise BadInput(
            f"{section.where}: {one.name} is about {one.metric}, for other models about "
            f"{other.metric}. Give it another name."
        )


def _check_goodput(section: Section, one: Objective, objectives: Objectives) -> None:
    """Reject a goodput objective that would equal availability."""
    in_force = (
        [each for each in objectives.all if each.model is None]
        if one.model is None
        else objectives.of_model(one.model)
    )
    if not any(each.metric in LATENCIES for each in in_force):
        models = "there is none" if one.model is None else f"{one.model} has none"
        raise BadInput(
            f"{section.where}: goodput needs a threshold to meet, and {models}. "
            f"Give one of: {', '.join(LATENCIES)}."
        )
