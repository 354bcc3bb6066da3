"""The life of a collector: alone, restarted, killed, beside engines that know nothing of it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from inferscope.daemon.exporter_set import check_exporters, make_exporters
from inferscope.errors import BadInput
from inferscope.readers.source import RecordingSource
from tests.cli.running import inferscope
from tests.daemon.running import collecting, engine_by_hand, eventually

_PINS = "pins: {folder: %s, before_s: 1, after_s: 0.2, on: [signal]}\n"


@pytest.mark.thorough
def test_a_killed_collector_leaves_engine_and_lock_and_the_next_counts_from_there(
    tmp_path: Path,
) -> None:
    rings, pins = tmp_path / "rings", tmp_path / "pins"
    with engine_by_hand(rings, "steady") as engine:
        engine.do("begin early", "go early 4", "end early stop", "begin over", "go over 2")
        with collecting(rings, tmp_path) as first:
            eventually(lambda: first.scrape().all("inferscope_requests_total") != [])
            refused = inferscope("collect", rings=rings)
            assert refused.returncode == 1
            assert f"process {first.process.pid}" in refused.stderr
            assert len(refused.stderr.splitlines()) == 1
            engine.do("begin a", "go a 3", "preempt a", "go a 2", "end a client_cancel")
            eventually(lambda: first.scrape().total("inferscope_requests_total") > 0)
            seen = first.scrape()
            # `early` had ended before anybody counted.
            assert seen.one("inferscope_requests_total", finish_reason="client_cancel") == 1
            assert seen.total("inferscope_requests_total") == 1
            assert seen.one("inferscope_tokens_total", phase="decode") == 5
            waste = {
                reason: seen.one("inferscope_wasted_gpu_seconds_total", reason=reason)
                for reason in ("cancel", "recompute", "padding")
            }
            assert min(waste.values()) > 0
            gpu_s = seen.total("inferscope_request_gpu_seconds_sum")
            assert waste["cancel"] + waste["recompute"] == pytest.approx(gpu_s)
            assert seen.one("inferscope_requests_running") == 1
            assert seen.one("inferscope_kv_cache_usage_ratio") == 0.02
            assert seen.one("inferscope_source_up", source="probe") == 1
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
        engine.do("go over 2")
        with collecting(rings, tmp_path, _PINS % pins) as second:
            eventually(lambda: second.scrape().all("inferscope_requests_total") != [])
            early = second.scrape()
            assert early.total("inferscope_requests_total") == 0
            assert early.total("inferscope_tokens_total") == 0
            engine.do("go over 2", "end over length")
            second.process.send_signal(signal.SIGUSR1)
            eventually(lambda: second.scrape().total("inferscope_requests_total") > 0)
            folded = "inferscope_folded_timestamp_seconds"
            eventually(lambda: second.scrape().one(folded) > early.one(folded) + 3)
            late = second.scrape()
            assert late.one("inferscope_requests_total", finish_reason="length") == 1
            assert late.one("inferscope_time_between_tokens_seconds_count") == 6
            assert late.one("inferscope_tokens_total", phase="decode") == 2
            assert late.one("inferscope_records_dropped_total", reason="joined_late") == 0
            # The device's time is all there: what passed is what was explained.
            spent_s = late.total("inferscope_gpu_phase_seconds_total") - early.total(
                "inferscope_gpu_phase_seconds_total"
            )
            passed_s = late.one(folded) - early.one(folded)
            # Records are folded up to now; time is explained up to the last Tick before.
            assert passed_s > 3
            assert spent_s == pytest.approx(passed_s, abs=0.5)
            assert time.time() - late.one(folded) < 30
            eventually(lambda: "pinned" in second.log())
            assert second.stop() == 0
        (pin,) = pins.glob("pin-*-signal.isr")
        source = RecordingSource(pin)
        source.advance()
        source.close()
        assert source.notes() == ()
        assert source.collector.engines["steady"].lives.num_finished > 0


@pytest.mark.thorough
def test_an_engine_started_again_under_its_id_goes_on(tmp_path: Path) -> None:
    rings = tmp_path / "rings"
    with collecting(rings, tmp_path, "pins: off\n") as collector:
        with engine_by_hand(rings, "again") as first:
            first.do("begin a", "go a 2")
            eventually(lambda: collector.scrape().total("inferscope_tokens_total") > 0)
            early = collector.scrape()
        with engine_by_hand(rings, "again") as second:
            second.do("begin b", "go b 3", "end b stop")
            eventually(
                lambda: (
                    collector.scrape().total("inferscope_requests_total", finish_reason="stop") == 1
                )
            )
            folded = "inferscope_folded_timestamp_seconds"
            eventually(lambda: collector.scrape().one(folded) > early.one(folded) + 3)
            late = collector.scrape()
    assert late.one("inferscope_requests_total", finish_reason="engine_lost") == 1
    assert late.one("inferscope_source_up", source="probe") == 1
    assert late.one("inferscope_tokens_total", phase="decode") == 5
    for scrape in (early, late):
        assert scrape.one("inferscope_engine_info", gpu="thin-air") == 1
    spent_s = [s.total("inferscope_gpu_phase_seconds_total", gpu="thin-air") for s in (early, late)]
    passed_s = late.one(folded) - early.one(folded)
    assert len(late.all("inferscope_gpu_phase_seconds_total")) == 6
    assert spent_s[1] - spent_s[0] == pytest.approx(passed_s, abs=0.5)


_FRAGILE = """
class Fragile:
    is_live = True
    def __init__(self, settings):
        self.settings = settings
    def describe(self):
        return "is fragile"
    def open(self):
        self.check()
    def check(self):
        if self.settings.get("is_heavy"):
            import a_heavy_dependency
        if self.settings.get("is_odd"):
            raise ImportError("it is odd")
    def on_step(self, step):
        raise RuntimeError("it broke")
    def on_request(self, request):
        pass
    def on_snapshot(self, snapshot):
        pass
    def close(self):
        pass
"""


def install(folder: Path) -> str:
    """Lay out a package as pip would; return what to put on PYTHONPATH."""
    (folder / "third_party.py").write_text(_FRAGILE, encoding="utf-8")
    package = folder / "third_party-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[inferscope.exporters]\nfragile = third_party:Fragile\n"
    )
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@pytest.mark.thorough
def test_an_exporter_that_raises_is_switched_off_and_the_others_go_on(tmp_path: Path) -> None:
    path, rings = install(tmp_path), tmp_path / "rings"
    with (
        engine_by_hand(rings, "steady") as engine,
        collecting(rings, tmp_path, "  fragile:\n", PYTHONPATH=path) as collector,
    ):
        assert "fragile: is fragile" in collector.log()
        eventually(lambda: collector.scrape().all("inferscope_requests_total") != [])
        engine.do("begin a", "end a stop")
        eventually(lambda: collector.scrape().total("inferscope_requests_total") == 1)
        assert collector.log().count("exporter fragile disabled after error: RuntimeError") == 1
        assert "Traceback" not in collector.log()
        assert collector.stop() == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("setting", "option", "message"),
    [
        ("is_heavy", "", "needs a_heavy_dependency. Install what third-party says that it needs."),
        ("is_odd", "--check", "cannot be loaded: it is odd. Ask third-party."),
    ],
)
def test_an_exporter_that_misses_a_package_is_named_with_its_owner(
    tmp_path: Path, setting: str, option: str, message: str
) -> None:
    path = install(tmp_path)
    file = tmp_path / "collect.yaml"
    file.write_text(f"exporters: {{fragile: {{{setting}: true}}}}", encoding="utf-8")
    words = ["collect", "--config", str(file), *filter(None, [option])]
    done = inferscope(*words, rings=tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [f"inferscope: the exporter fragile {message}"]


def test_ours_state_which_extra_they_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    exporters = make_exporters({"prometheus": {"port": 0}})
    check_exporters(exporters)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(BadInput, match=r'pip install "inferscope-llm\[prometheus\]"$'):
        check_exporters(exporters)


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
def test_check_tries_the_address(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        exporters = make_exporters({"prometheus": {"host": host, "port": port}})
        with pytest.raises(BadInput, match=f"cannot serve on {host}:{port}: .+ Set exporters"):
            check_exporters(exporters)
    if host == "127.0.0.1":
        check_exporters(exporters)


def test_check_states_what_it_would_do_and_opens_nothing(tmp_path: Path) -> None:
    file = tmp_path / "collect.yaml"
    settings = f"pins: {{folder: {tmp_path}/pins, on: []}}\nslo: {{ttft_ms: 500}}\n"
    settings += "counters: {sources: [host], interval: 1s}\nheaders: [tenant, 'adapter:hash']\n"
    file.write_text(settings + "exporters: {prometheus: {port: 0}, otlp: }", encoding="utf-8")
    done = inferscope("collect", "--config", str(file), "--check", rings=tmp_path / "rings")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "http://127.0.0.1:0/metrics" in done.stdout
    assert "on nothing" in done.stdout
    assert "first token 500 ms" in done.stdout
    lines = done.stdout.splitlines()
    assert f"{'counters':<12}host --interval 1000000us" in lines
    assert f"{'headers':<12}tenant, adapter:hash, if engines record them" in lines
    asked = ("collect", "--config", str(file), "--check", "--counters", "off")
    done = inferscope(*asked, rings=tmp_path / "rings", INFERSCOPE_COLLECT_HEADERS="off")
    lines = done.stdout.splitlines()
    assert f"{'counters':<12}off: this collector starts no sampler" in lines
    assert f"{'headers':<12}none" in lines
    assert not (tmp_path / "pins").exists()
    assert not (tmp_path / "rings").exists()
