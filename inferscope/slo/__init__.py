"""Objectives: verdicts per request, breaches with their causes, and the remaining error budget."""

from inferscope.slo.objectives import Metric, Objective, Objectives, read_objectives

__all__ = ["Metric", "Objective", "Objectives", "read_objectives"]
