"""The contract of an export, kept by a run on two engines and by one of a mixture of experts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from inferscope.exporting import load_exporter
from inferscope.readers.source import RingSource
from tests.cli.running import inferscope
from tests.engine.server.running import serving
from tests.export_contract import MAX_UNATTRIBUTED_SHARE, Totals, check

pytestmark = pytest.mark.slow

_MIN_REQUESTS = 10


def assert_kept(totals: Totals) -> None:
    """Assert that no law is broken, and that the run has prefills beside decodes to show it."""
    assert totals.breaches == []
    assert totals.num_requests >= _MIN_REQUESTS
    assert totals.num_mixed
    assert totals.unattributed_ns <= MAX_UNATTRIBUTED_SHARE * totals.measured_ns


def ring_totals(rings: Path) -> Totals:
    """Export the rings of all engines, which have ended, and return the totals."""
    lines = io.BytesIO()
    exporter = load_exporter("jsonl")(lines)
    source = RingSource(lambda: rings.glob("*/*.ring"), name="", sinks=(exporter,))
    while not source.has_ended:
        source.advance()
    exporter.close(source.collector.devices(), source.collector.totals())
    source.close()
    return check(map(json.loads, lines.getvalue().splitlines()))


def run_totals(folder: Path, *words: str) -> Totals:
    """Serve a model under load, export its run, and return the totals."""
    # A pool of a few requests: prompts wait, and decodes are preempted.
    small = ("--num-blocks", "80", "--max-model-len", "512", "--token-budget", "64")
    with serving(folder, *words, *small) as server:
        server.wait()
        done = inferscope(
            "load", f"http://127.0.0.1:{server.port}", "--rate", "5", "--duration", "4",
            "--prompt-tokens", "32..256", "--output-tokens", "8..48", "--seed", "3",
            rings=server.rings, timeout_s=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert server.stop() == 0, server.said()
    return ring_totals(server.rings)


def test_a_run_on_two_engines_keeps_the_contract(tmp_path: Path) -> None:
    totals = run_totals(tmp_path, "builtin", "--disaggregate")
    assert_kept(totals)
    assert totals.num_requests >= 2 * _MIN_REQUESTS


def test_a_run_of_a_mixture_of_experts_keeps_the_contract(tmp_path: Path) -> None:
    # Large enough that an expert's weights cost time: the equal split of tokens would be wrong.
    assert_kept(run_totals(tmp_path, "random:tiny-moe,hidden=256,layers=4,ffn=256"))
