"""Findings: the classic mistakes that a run shows, from what the fold has made final."""

from inferscope.findings.finding import Counterfactual, Finding, Number
from inferscope.findings.promised import Promised
from inferscope.findings.rules import EngineFindings, findings
from inferscope.findings.watch import Watch

__all__ = ["Counterfactual", "EngineFindings", "Finding", "Number", "Promised", "Watch", "findings"]
