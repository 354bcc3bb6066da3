"""A server that was killed: its rings still answer why, since when, and how it looked then."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import Run, inferscope, running_engine
from tests.insight.test_why import SAMPLE

pytestmark = pytest.mark.thorough


class Killed:
    """What a killed engine left, and what was seen of it before."""

    def __init__(self, folder: Path) -> None:
        # More than it can answer: some are always under way.
        with running_engine(folder, rate_s=15) as engine:
            self.pid = engine.process.pid
            engine.wait_for(8)
            time.sleep(1.5)  # so that there is a past to its past
            self.alive = engine.wait_for(8)
        self.rings = engine.rings
        time.sleep(5.2)  # until its heartbeat counts as stopped
        out = folder / "killed.jsonl"
        done = inferscope("export", str(self.rings), "-o", str(out), rings=self.rings)
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        self.requests = [row for row in rows if row["kind"] == "request"]
        self.digest = rows[-1]["digest"]

    def finished(self) -> dict[str, Any]:
        """Return a request that came to its end."""
        return next(row for row in self.requests if row["finish"] in ("stop", "length"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """Run an engine, and kill it."""
    return Killed(tmp_path_factory.mktemp("killed"))


def test_why_explains_a_request_of_a_killed_server(killed: Killed) -> None:
    request = killed.finished()
    done = inferscope("why", request["external_id"], rings=killed.rings)
    assert done.returncode == 0, done.stderr
    life_ns = request["delivered_ns"] - request["arrived_ns"]
    assert f"the rows sum to {life_ns:,} ns" in " ".join(done.stdout.split())
    assert request["external_id"] in done.stdout.splitlines()[0]
    assert "\x1b" not in done.stdout
    by_id = inferscope("why", request["request"], str(killed.pid), "--json", rings=killed.rings)
    report = json.loads(by_id.stdout)["report"]
    assert {row["cause"]: row["ns"] for row in report["rows"]} == request["ledger_ns"]


def test_why_states_that_a_request_was_lost_with_its_engine(killed: Killed) -> None:
    lost = [row for row in killed.requests if row["finish"] == "engine_lost"]
    assert lost
    done = inferscope("why", lost[0]["request"], rings=killed.rings)
    assert done.returncode == 0, done.stderr
    assert "lost with its engine" in done.stdout
    assert "engine_lost" in done.stdout


def test_why_reads_one_ring_and_a_folder_as_well(killed: Killed, tmp_path: Path) -> None:
    request = killed.finished()
    for source in (killed.rings, next(killed.rings.glob("*/core-*.ring"))):
        done = inferscope("why", request["request"], str(source), rings=tmp_path)
        assert done.returncode == 0, done.stderr
        assert request["request"] in done.stdout


def test_several_matches_are_listed_newest_first_and_one_can_be_picked(killed: Killed) -> None:
    done = inferscope("why", "fe-", rings=killed.rings)
    assert done.returncode == 2
    assert done.stdout == ""
    *listed, hint = done.stderr.splitlines()
    assert f"{len(killed.requests)} requests match fe-" in hint
    dates = [" ".join(line.split()[1:3]) for line in listed if "…" not in line]
    assert dates == sorted(dates, reverse=True)
    assert len(dates) > 1
    picked = inferscope("why", "fe-", "--pick", "2", rings=killed.rings)
    assert picked.returncode == 0, picked.stderr
    assert picked.stdout.split()[0] == listed[1].split()[3]
    beyond = inferscope("why", "fe-", "--pick", "9999", rings=killed.rings)
    assert beyond.returncode == 2
    assert "--pick is 9999" in beyond.stderr


def test_no_match_states_where_it_looked(killed: Killed) -> None:
    done = inferscope("why", "missing", rings=killed.rings)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "no request ID begins with missing" in line
    assert str(killed.rings) in line
    assert "give a recording or a folder of rings" in line


def test_no_match_in_a_recording_states_how_to_see_the_names(tmp_path: Path) -> None:
    done = inferscope("why", "missing", str(SAMPLE), rings=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"`inferscope shares {SAMPLE}` lists the IDs" in line
    assert "can be given after" not in line


def test_why_reports_a_truncated_recording(tmp_path: Path) -> None:
    cut = tmp_path / "cut.isr"
    cut.write_bytes(SAMPLE.read_bytes()[:100_000])
    done = inferscope("why", "chat-0011", str(cut), rings=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the recording is truncated" in done.stderr
    assert "truncated" not in done.stdout


def test_why_in_a_recording_agrees_with_its_export(demo: Run, tmp_path: Path) -> None:
    for request in demo.of_kind("request")[:2]:
        done = inferscope(
            "why", request["request"], str(demo.folder / "demo.isr"), "--json", rings=tmp_path
        )
        rows = json.loads(done.stdout)["report"]["rows"]
        assert {row["cause"]: row["ns"] for row in rows} == request["ledger_ns"]


def test_attach_since_opens_what_a_killed_server_left(killed: Killed) -> None:
    done = inferscope("attach", "--since", "-5m", "--once", "--json", rings=killed.rings)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["mode"] == "ended"
    (engine,) = seen["engines"]
    assert engine["num_finished"] >= killed.alive["num_finished"] > 0
    assert {row["request_id"] for row in engine["requests"]} == {
        row["request"] for row in killed.requests
    }
    output = inferscope("attach", "--since=5m", "--once", rings=killed.rings).stdout
    assert "ended" in output.splitlines()[0]


def test_attach_since_shows_only_what_reaches_into_the_window(killed: Killed) -> None:
    folder = str(killed.rings)
    last_ns = max(row["delivered_ns"] for row in killed.requests)
    done = inferscope("attach", folder, "--since", "1s", "--once", "--json", rings=killed.rings)
    (engine,) = json.loads(done.stdout)["engines"]
    shown = {row["request_id"] for row in engine["requests"]}
    ended = {row["request"]: row["delivered_ns"] for row in killed.requests}
    # The records end a moment before or after the last request does.
    assert {name for name, at_ns in ended.items() if at_ns > last_ns - 200_000_000} <= shown
    assert shown < set(ended)
    assert all(ended[name] > last_ns - 8_000_000_000 for name in shown)


def test_attach_at_shows_how_it_was_then(killed: Killed) -> None:
    looks = []
    for at in ("+1", "2s"):
        done = inferscope("attach", "--at", at, "--once", "--json", rings=killed.rings)
        assert done.returncode == 0, done.stderr
        looks.append(json.loads(done.stdout))
    assert [look["mode"] for look in looks] == ["paused", "paused"]
    assert looks[1]["mono_ns"] - looks[0]["mono_ns"] > 0
    finished = [look["engines"][0]["num_finished"] for look in looks]
    assert finished[0] <= finished[1] <= killed.alive["num_finished"] + 8


def test_a_time_outside_of_the_records_is_named(killed: Killed) -> None:
    before = inferscope("attach", "--at", "-1d", "--once", rings=killed.rings)
    assert before.returncode == 2
    assert "--at is -1d" in before.stderr
    late = inferscope("attach", "--since", "100ms", "--once", rings=killed.rings)
    assert late.returncode == 1
    assert "Give an earlier time" in late.stderr
    named = inferscope("attach", str(killed.pid), "--since", "100ms", "--once", rings=killed.rings)
    assert named.returncode == 1
    assert "ended at" in named.stderr


def test_attach_lists_engines_that_have_ended_and_how_to_open_them(killed: Killed) -> None:
    done = inferscope("attach", rings=killed.rings)
    assert done.returncode == 1
    _, listed, hint = done.stderr.splitlines()
    assert str(killed.pid) in listed
    assert "ended" in listed
    assert "builtin" in listed
    assert "attach --since -5m" in hint
    opened = inferscope("attach", str(killed.pid), "--once", rings=killed.rings)
    assert opened.returncode == 0, opened.stderr


def test_replay_opens_rings_and_gives_the_numbers_of_the_export(killed: Killed) -> None:
    done = inferscope("replay", str(killed.rings), "--check", rings=killed.rings)
    assert done.stdout.strip() == killed.digest
    picture = killed.rings.parent / "picture.svg"
    picture.touch(mode=0o644)
    drawn = inferscope(
        "replay", str(killed.rings), "--screenshot", str(picture), rings=killed.rings
    )
    assert drawn.returncode == 0, drawn.stderr
    assert picture.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("verb", ["on", "off"])
def test_an_engine_that_has_ended_cannot_be_switched(killed: Killed, verb: str) -> None:
    done = inferscope(verb, str(killed.pid), rings=killed.rings)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "has ended" in line
