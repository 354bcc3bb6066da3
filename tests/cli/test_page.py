"""`attach http://…`, as a user types it: against our own collect, and against what is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.running import inferscope, inferscope_cold
from tests.daemon.running import collecting, engine_by_hand, eventually
from tests.metrics_page.page_server import serving


@pytest.mark.thorough
def test_what_collect_serves_is_what_attach_shows(tmp_path: Path) -> None:
    rings = tmp_path / "rings"
    with engine_by_hand(rings, "steady") as engine, collecting(rings, tmp_path) as collector:
        eventually(lambda: collector.scrape().all("inferscope_requests_total") != [])
        engine.do("begin a", "go a 3", "end a stop", "begin b", "go b 2")
        eventually(lambda: collector.scrape().total("inferscope_requests_total") == 1)
        target = collector.url.removesuffix("/metrics")
        done = inferscope("attach", target, "--json", rings=tmp_path)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert (document["source"], document["server"]) == ("metrics page", "inferscope collect")
        assert document["ledger"] is None
        assert document["num_running"] == 1
        assert document["kv_share"] == collector.scrape().one("inferscope_kv_cache_usage_ratio")
        assert document["ttft"]["num"] == document["e2e"]["num"] == 1
        assert document["requests_s"] == 0
        text = inferscope_cold("attach", target.removeprefix("http://"), "--once", rings=tmp_path)
        assert text.returncode == 0, text.stderr
        assert "inferscope collect" in text.stdout
        assert "no ledger" in text.stdout


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ("http://", 2, "is not a server address"),
        ("ftp://localhost:1", 2, "is not a server address"),
        ("localhost:1", 1, "cannot be reached"),
        ("{page}", 1, "does not match a known server"),
        ("{page}/elsewhere", 1, "does not match a known server"),
        ("{page} --since -5m", 2, "has no history"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    target: str, code: int, message: str, tmp_path: Path
) -> None:
    with serving("go_threads 3\n") as server:
        done = inferscope("attach", *target.format(page=server.url).split(), rings=tmp_path)
    assert done.returncode == code
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout


def test_a_page_that_is_html_is_one_line(tmp_path: Path) -> None:
    with serving("<html><body>hello</body></html>") as server:
        done = inferscope("attach", server.url, "--once", rings=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "is not a metrics page" in done.stderr
    assert len(done.stderr.splitlines()) == 1
