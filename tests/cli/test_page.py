"""`attach http://…`, as a user types it: against our own collect, and against what is none."""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path

import pytest

from inferscope.cli.attach.unobserved import offer, unobserved_servers
from inferscope.cli.main import main
from inferscope.errors import NotFound
from inferscope.metrics_page import discovery
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


@pytest.mark.thorough
def test_findings_of_a_page_are_those_of_its_totals(tmp_path: Path) -> None:
    page = (
        "vllm:num_requests_running 8\nvllm:num_requests_waiting 4\nvllm:kv_cache_usage_perc 0.2\n"
        'vllm:request_success_total{model_name="llama"} 100\n'
    )
    with serving(page) as server:
        done = inferscope("findings", server.url, "--json", rings=tmp_path)
        text = inferscope("findings", server.url.removeprefix("http://"), rings=tmp_path)
        refused = inferscope("findings", server.url, "--refit", rings=tmp_path)
        screen = inferscope("attach", server.url, "--once", rings=tmp_path)
    (engine,) = json.loads(done.stdout)["engines"]
    assert (engine["model"], engine["num_requests"]) == ("llama", 100)
    assert [each["id"] for each in engine["findings"]] == ["small_batch_with_queue"]
    assert {"slow_rank", "bad_ttft"} <= {each["id"] for each in engine["not_judged"]}
    assert "1. Requests wait while KV memory is free" in text.stdout
    assert "bad_ttft: the page lacks a histogram of ttft" in text.stdout
    assert (refused.returncode, "Leave out --refit" in refused.stderr) == (2, True)
    assert "Requests wait while KV memory is free: 4 requests wait and 8 run" in screen.stdout


def test_a_server_on_a_usual_port_is_offered_where_no_engine_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    with serving('vllm:num_requests_running{model_name="llama"} 8\n') as server:
        port = int(server.url.rpartition(":")[2])
        closed = _closed_port()
        monkeypatch.setattr(discovery.find_pages, "__defaults__", ((closed, port),))
        assert main(["attach", "--once"]) == 1
        line = capsys.readouterr().err
        assert "no engine is running" in line
        assert f"`inferscope attach {server.url}` (vLLM llama)" in line
        assert offered(["x\n", "\n"], server.url, monkeypatch) == server.url
        with pytest.raises(NotFound, match="no page was chosen"):
            offered(["q\n"], server.url, monkeypatch)
    assert discovery.find_pages() == (), "the server has ended"


def offered(answers: list[str], url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(answers)))
    servers = unobserved_servers()
    assert servers == [(url, "vLLM llama")]
    return offer(servers)


def _closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def test_a_page_that_is_html_is_one_line(tmp_path: Path) -> None:
    with serving("<html><body>hello</body></html>") as server:
        done = inferscope("attach", server.url, "--once", rings=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "is not a metrics page" in done.stderr
    assert len(done.stderr.splitlines()) == 1
