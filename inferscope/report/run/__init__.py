"""The report of one run: its sections, each a function of the run's facts."""

from inferscope.report.run.report import run_page
from inferscope.report.run.source import Source

__all__ = ["Source", "run_page"]
