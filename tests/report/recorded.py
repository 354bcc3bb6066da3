"""Recordings made to order, and their reports."""

from __future__ import annotations

from pathlib import Path

from inferscope.insight import RequestSource
from inferscope.insight.run import RunSink, with_details
from inferscope.readers import catch_up, open_source
from inferscope.report import render
from inferscope.report.run import Source, run_page
from inferscope.ring import RecordedFrame, RecordingWriter
from tests.fold.scripts import Script
from tests.report.html import Parsed, parse


def write(script: Script, path: Path) -> Path:
    """Write a script's records as a recording."""
    writer = RecordingWriter(path)
    for item in script.items():
        kind = item.record.CODE
        writer.write(RecordedFrame(item.ring, kind, item.sequence, item.t_ns, item.payload))
    writer.close()
    return path


def report(path: Path) -> Parsed:
    """Return the parsed report on a recording, without objectives."""
    sink = RunSink()
    source = open_source(path, sinks=(sink,), listen=sink.on_record)
    catch_up(source)
    source.close()
    facts = with_details(sink.facts(source.collector), RequestSource(str(path), recording=path))
    return parse(render(run_page(facts, Source(path.name, False))))
