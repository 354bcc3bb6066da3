"""Forward-pass metrics of SGLang and NVIDIA Dynamo: a source without a probe."""

from inferscope.insight.passes.reading import ForwardPass, read_passes, receive_passes
from inferscope.insight.passes.rules import passes_findings
from inferscope.insight.passes.view import PassesDocument, passes_view

__all__ = [
    "ForwardPass",
    "PassesDocument",
    "passes_findings",
    "passes_view",
    "read_passes",
    "receive_passes",
]
