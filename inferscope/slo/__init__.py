"""Objectives: what is good and bad, decided request by request, and what is left of the budget."""

from inferscope.slo.objectives import Metric, Objective, Objectives, read_objectives

__all__ = ["Metric", "Objective", "Objectives", "read_objectives"]
