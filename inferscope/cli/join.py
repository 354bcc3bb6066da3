"""Compare a load generator's latencies with the server's, request by request.

FILE is what the client wrote: AIPerf's profile_export.jsonl, GuideLLM's JSON report, or the file of
`inferscope load --out`. Requests are matched by ID: AIPerf and `load` send X-Request-Id, GuideLLM
keeps the id of the response. Where both wall clocks agree, the difference is divided into the time
before the request arrived and the time after its first token left.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from inferscope.cli.folding import fold_all
from inferscope.insight.clients import JoinSink, join, read_client_file
from inferscope.text import join_json, join_text

_WIDTH = 100
_PATIENCE_S = 300.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "source", metavar="RECORDING", help="recording, ring or folder, or an engine's pid or ID"
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="file of the load generator")
    how = parser.add_argument_group("output")
    how.add_argument("--json", action="store_true", help="print all requests as JSON")
    how.add_argument("--ascii", action="store_true", help="write plain characters")
    parser.epilog = """examples:
  inferscope join run.isr artifacts/profile_export.jsonl
  inferscope join run.isr benchmarks.json --json | jq '.joined.ttft'
  inferscope join 41233 client.jsonl        a running engine, and what load --out wrote
"""


def run(options: argparse.Namespace) -> int:
    """Join the two and print what they show."""
    file = read_client_file(options.file)
    sink = JoinSink()
    source = fold_all(options.source, sink, patience_s=_PATIENCE_S)
    joined = join(file, sink.requests, source.collector.real_offset_ns)
    if options.json:
        sys.stdout.write(join_json(joined, source=source.title, file=str(options.file)))
        return 0
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 40)).columns)
    sys.stdout.write(join_text(joined, width=width, ascii=options.ascii))
    return 0
