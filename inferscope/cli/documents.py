"""Types of the documents that commands print with `--json`, by command.

`docs/json_reference.py` generates `docs/json.md` from them, and tests decode the commands' output
with them. No command imports this module, because it imports the commands.
"""

from __future__ import annotations

from inferscope.cli.calibrate.command import CalibrationDocument
from inferscope.cli.doctor.device import DoctorDocument
from inferscope.cli.engine_list import EngineList
from inferscope.cli.sampler import SamplerDocument
from inferscope.cli.slo.check import CheckDocument
from inferscope.fold import SnapshotDocument
from inferscope.insight import ProfileDocument
from inferscope.insight.passes import PassesDocument
from inferscope.json_document import Document
from inferscope.load import LoadDocument
from inferscope.metrics_page import PageView
from inferscope.text import (
    CacheDocument,
    ComparisonDocument,
    DiffDocument,
    FindingsDocument,
    JoinDocument,
    SharesDocument,
    WhyDocument,
)

LIST, PAGE, PASSES = "attach (several engines)", "attach URL", "attach FILE.jsonl"
"""Names of the documents that `attach` prints for targets other than one engine."""
COMPARISON = "demo --compare"
"""Name of the document that `demo` prints for a comparison."""

DOCUMENTS: dict[str, type[Document]] = {
    "attach": SnapshotDocument,
    LIST: EngineList,
    PAGE: PageView,
    PASSES: PassesDocument,
    "demo": SnapshotDocument,
    COMPARISON: ComparisonDocument,
    "why": WhyDocument,
    "shares": SharesDocument,
    "cache": CacheDocument,
    "findings": FindingsDocument,
    "diff": DiffDocument,
    "join": JoinDocument,
    "slo check": CheckDocument,
    "sampler": SamplerDocument,
    "load": LoadDocument,
    "profile": ProfileDocument,
    "calibrate": CalibrationDocument,
    "doctor": DoctorDocument,
}
