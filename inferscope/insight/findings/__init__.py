"""Findings: common performance problems of a run, detected from final records."""

from inferscope.insight.findings.disaggregation import Disaggregation, Distribution
from inferscope.insight.findings.finding import (
    Counterfactual,
    Finding,
    Number,
    ObjectiveMiss,
    Severity,
)
from inferscope.insight.findings.formatting import times
from inferscope.insight.findings.rules import FEWEST_REQUESTS, EngineFindings, findings
from inferscope.insight.findings.run_summary import RunSummarizer
from inferscope.insight.findings.slo_findings import SloFindings

__all__ = [
    "FEWEST_REQUESTS",
    "Counterfactual",
    "Disaggregation",
    "Distribution",
    "EngineFindings",
    "Finding",
    "Number",
    "ObjectiveMiss",
    "RunSummarizer",
    "Severity",
    "SloFindings",
    "findings",
    "times",
]
