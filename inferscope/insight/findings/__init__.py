"""Findings: common performance problems of a run, detected from final records."""

from inferscope.insight.findings.disaggregation import Disaggregation, Distribution
from inferscope.insight.findings.finding import (
    Counterfactual,
    Finding,
    NotJudged,
    Number,
    ObjectiveMiss,
    Severity,
)
from inferscope.insight.findings.formatting import duration, percent, times
from inferscope.insight.findings.requests import TPOT_LIMIT_NS, TTFT_LIMIT_NS
from inferscope.insight.findings.rules import FEWEST_REQUESTS, RULES, EngineFindings, findings
from inferscope.insight.findings.run_summary import RunSummarizer
from inferscope.insight.findings.slo_findings import SloFindings

__all__ = [
    "FEWEST_REQUESTS",
    "RULES",
    "TPOT_LIMIT_NS",
    "TTFT_LIMIT_NS",
    "Counterfactual",
    "Disaggregation",
    "Distribution",
    "EngineFindings",
    "Finding",
    "NotJudged",
    "Number",
    "ObjectiveMiss",
    "RunSummarizer",
    "Severity",
    "SloFindings",
    "duration",
    "findings",
    "percent",
    "times",
]
