"""Facts about a whole run, for reports and comparisons: one fold over its records."""

from inferscope.insight.run.course import CourseBin
from inferscope.insight.run.facts import EngineFacts, RunFacts
from inferscope.insight.run.ledger_bands import LedgerBand
from inferscope.insight.run.roofline import RooflinePoint
from inferscope.insight.run.second_pass import with_details
from inferscope.insight.run.sink import RunSink
from inferscope.insight.run.worst_second import WorstSecond

__all__ = [
    "CourseBin",
    "EngineFacts",
    "LedgerBand",
    "RooflinePoint",
    "RunFacts",
    "RunSink",
    "WorstSecond",
    "with_details",
]
