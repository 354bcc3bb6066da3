"""Reports on runs of all shapes: no requests, several engines or ranks, hostile names."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferscope.records import EngineInfo
from tests.fold.scripts import Ring, Script
from tests.fold.test_cache_records import admit
from tests.report.html import Parsed
from tests.report.recorded import report, write
from tests.report.test_page import ALLOWED, HOSTILE

PICTURES = {
    *("svg", "g", "path", "text", "defs", "use", "title", "pattern", "rect", "clippath"),
    *("tspan", "line", "polyline", "image"),
}


def serve(ring: Ring, names: list[str], *, start_ms: float = 0, **more: object) -> None:
    """Serve requests one after the other: a prefill and two decodes each."""
    script = ring.script
    for number, name in enumerate(names):
        at_ms = start_ms + 20 * number
        script.at(at_ms)
        index = ring.queued(name, **more)
        ring.admitted(index)
        for step, (tokens, context) in enumerate(((8, 0), (1, 8), (1, 9))):
            began = at_ms + 5 * step
            row = [(index, tokens, context)]
            ring.step(3 * number + step, row, start_ms=began, end_ms=began + 4)
        ring.finished(index)


def assert_sound(page: Parsed) -> None:
    assert {tag for tag, _ in page.tags} <= ALLOWED | PICTURES
    assert not [name for _, found in page.tags for name in found if name.startswith("on")]
    ids = [found["id"] for _, found in page.tags if found.get("id")]
    assert len(set(ids)) == len(ids)
    for key, value in page.values.items():
        assert (page.printed[key] == "-") == (value is None), key


def test_a_run_without_a_request_has_a_report(tmp_path: Path) -> None:
    script = Script()
    script.ring()
    page = report(write(script, tmp_path / "run.isr"))
    assert_sound(page)
    assert page.values["verdict", "finished"] == 0
    assert page.values["verdict", "ttft.p95_ns"] is None
    assert "No verdict: 0 finished requests, fewer than 20." in page.texts


def test_a_run_without_a_finished_request_has_a_report(tmp_path: Path) -> None:
    script = Script()
    ring = script.ring()
    index = ring.queued("alive")
    ring.admitted(index)
    ring.step(1, [(index, 8, 0)], start_ms=1, end_ms=5)
    ring.step(2, [(index, 1, 8)], start_ms=6, end_ms=8)
    page = report(write(script, tmp_path / "run.isr"))
    assert_sound(page)
    assert page.values["verdict", "in_flight"] == 1
    assert page.of("phases")["steps.measured_ns"] == 6_000_000
    assert page.of("latency").keys() == {
        f"{name}.{key}"
        for name in ("ttft", "tbt", "e2e")
        for key in ("num", "mean_ns", "p50_ns", "p95_ns", "p99_ns", "max_ns")
    }


def test_a_request_without_a_ledger_is_listed_with_the_reason(tmp_path: Path) -> None:
    script = Script()
    ring = script.ring("frontend")
    index = ring.received("unseen")
    script.at(5)
    ring.emitted([index])
    script.at(9)
    ring.emitted([index])
    ring.last_byte(index)
    script.at(30_000)
    ring.health()
    page = report(write(script, tmp_path / "run.isr"))
    assert_sound(page)
    assert page.values["verdict", "finished"] == 1
    assert any("It has no ledger (core not observed)." in text for text in page.texts)


@pytest.mark.thorough
def test_names_from_a_recording_are_never_markup(tmp_path: Path) -> None:
    script = Script()
    ring = script.ring(engine_id=HOSTILE[0])
    names = {"served_name": HOSTILE[1], "model": HOSTILE[5], "version": HOSTILE[2]}
    ring.write(EngineInfo(ring.now_ns, HOSTILE[6], device=HOSTILE[3], **names))
    for number, text in enumerate(HOSTILE):
        more = {"external_id": text, "attributes": {"tenant": text}, "adapter": text}
        serve(ring, [f"{text}-{number}"], start_ms=20 * number, **more)
    page = report(write(script, tmp_path / "run.isr"))
    assert_sound(page)
    joined = "\n".join(page.texts)
    for text in HOSTILE:
        assert text in joined


def test_prompt_tokens_are_divided_by_their_fate_in_the_cache(tmp_path: Path) -> None:
    script = Script()
    core = script.ring()
    first = admit(core, "a", at_ms=1, unmatched=8)
    core.step(0, [(first, 8, 0)], start_ms=2, end_ms=10)
    script.at(11)
    core.finished(first)
    second = admit(core, "b", at_ms=12, hit=2, evicted=4, rounding=2, evictor=first)
    core.step(1, [(second, 6, 2)], start_ms=13, end_ms=19)
    script.at(20)
    core.finished(second)
    page = report(write(script, tmp_path / "run.isr"))
    found = page.of("prefix-cache")
    assert (found["prompt_tokens"], found["hit_share"]) == (16, 2 / 16)
    tokens = {key: value for key, value in found.items() if key.endswith(".tokens")}
    assert tokens.pop("sum.tokens") == sum(filter(None, tokens.values())) == 16
    assert tokens["evicted.tokens"] == 4
    assert found["evicted.gpu_ns"] == 4_000_000
    prefill_ns = page.of("phases")["steps.prefill_ns"]
    assert found["sum.gpu_ns"] == prefill_ns


@pytest.mark.thorough
def test_each_engine_has_its_sections(tmp_path: Path) -> None:
    script = Script()
    one, other = script.ring(engine_id="one"), script.ring(engine_id="other")
    serve(one, ["a", "b"])
    serve(other, ["c"], start_ms=100)
    page = report(write(script, tmp_path / "run.isr"))
    assert_sound(page)
    assert page.values["engine-1-verdict", "finished"] == 2
    assert page.values["engine-2-verdict", "finished"] == 1
    assert {"one", "other"} <= set(page.texts)


@pytest.mark.thorough
def test_the_worst_second_has_a_lane_for_each_rank(tmp_path: Path) -> None:
    script = Script()
    core = script.ring(ranks=2)
    worker = script.ring("worker", rank=1, ranks=2)
    index = core.queued("a")
    core.admitted(index)
    for step, context in enumerate((0, 8, 9, 10)):
        rows = [(index, 1 if context else 8, context)]
        core.step(step, rows, start_ms=10 * step, end_ms=10 * step + 5)
        worker.span(step, 10 * step, 10 * step + 8)
    core.finished(index)
    script.at(3_000)
    core.health()
    worker.health()
    page = report(write(script, tmp_path / "run.isr"))
    assert_sound(page)
    assert {"rank 0.0", "rank 0.1"} <= set(page.texts)
