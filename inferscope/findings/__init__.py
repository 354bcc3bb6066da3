"""Findings: common performance problems of a run, detected from final records."""

from inferscope.findings.finding import Counterfactual, Finding, Number
from inferscope.findings.rules import EngineFindings, findings
from inferscope.findings.run_summary import RunSummarizer
from inferscope.findings.slo_findings import SloFindings

__all__ = [
    "Counterfactual",
    "EngineFindings",
    "Finding",
    "Number",
    "RunSummarizer",
    "SloFindings",
    "findings",
]
