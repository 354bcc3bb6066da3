"""The type of every document that a command prints with `--json`, by command.

`docs/json_reference.py` writes `docs/json.md` from it, and the tests decode what commands print
by it. No command imports this module: it imports the commands.
"""

from __future__ import annotations

from inferscope.cli.calibrate import CalibrationDocument
from inferscope.cli.doctor_device import DoctorDocument
from inferscope.cli.engine_list import EngineList
from inferscope.cli.sampler import SamplerDocument
from inferscope.cli.slo_check import CheckDocument
from inferscope.collector.snapshot import SnapshotDocument
from inferscope.json_document import Document
from inferscope.load.report import LoadDocument
from inferscope.metrics_page.view import PageView
from inferscope.report.findings import FindingsDocument
from inferscope.report.kernels import ProfileDocument
from inferscope.report.shares_text import SharesDocument
from inferscope.report.text import WhyDocument

LIST, PAGE = "attach (several engines)", "attach URL"
"""What `attach` prints for a target that is not one engine."""

DOCUMENTS: dict[str, type[Document]] = {
    "attach": SnapshotDocument,
    LIST: EngineList,
    PAGE: PageView,
    "demo": SnapshotDocument,
    "why": WhyDocument,
    "shares": SharesDocument,
    "findings": FindingsDocument,
    "slo check": CheckDocument,
    "sampler": SamplerDocument,
    "load": LoadDocument,
    "profile": ProfileDocument,
    "calibrate": CalibrationDocument,
    "doctor": DoctorDocument,
}
