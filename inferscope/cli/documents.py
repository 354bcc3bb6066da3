"""Types of the documents that commands print with `--json`, by command.

`docs/json_reference.py` generates `docs/json.md` from them, and tests decode the commands' output
with them. No command imports this module, because it imports the commands.
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
"""Names of the documents that `attach` prints for targets other than one engine."""

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
