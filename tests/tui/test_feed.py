from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest

from inferscope.errors import UnreadableFile
from inferscope.fold import Sink
from inferscope.fold.snapshots import Snapshot
from inferscope.insight.findings import RunSummarizer
from inferscope.insight.judged_source import JudgedSource
from inferscope.readers import HistorySource, Listener, RecordingSource
from inferscope.records import Record
from inferscope.tui.app import InferScopeApp, SnapshotReady, SourceFailed
from inferscope.tui.source import Feed
from tests.insight.test_why import SAMPLE
from tests.tui.live_screen import play, screen
from tests.tui.scenes import MovingSource, moving_snapshot

WAIT_S = 30.0


def test_a_newer_snapshot_replaces_one_that_waits() -> None:
    older, newer = SnapshotReady(moving_snapshot(0)), SnapshotReady(moving_snapshot(1))
    assert newer.can_replace(older)
    assert not newer.can_replace(SourceFailed("no"))


def test_the_feed_fetches_over_the_window_and_closes_its_source() -> None:
    source, enough = MovingSource(), threading.Event()
    seen: list[Snapshot] = []

    def take(snapshot: Snapshot) -> None:
        seen.append(snapshot)
        if len(seen) >= 3:
            enough.set()

    feed = Feed(
        source, window_ns=7, refresh_hz=500, on_snapshot=take, on_failure=lambda reason: None
    )
    feed.start()
    assert enough.wait(WAIT_S)
    feed.stop()
    assert source.is_closed
    assert source.windows_ns[0] == 7
    assert [snapshot.mono_ns for snapshot in seen] == sorted(snapshot.mono_ns for snapshot in seen)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_process_ends_cleanly_while_its_feed_folds(is_stopped: bool) -> None:
    """`np.unique` of a daemon thread aborts a process that exits: status -6 in 11 of 12 runs."""
    script = f"""
        import sys, threading
        import numpy as np
        from inferscope.tui.source import Feed

        numbers, has_begun = np.arange(20_000) % 1_000, threading.Event()

        class Folding:
            is_interrupted = False

            def snapshot(self, window_ns):
                for _ in range(3_000):
                    np.unique(numbers)
                    has_begun.set()
                    if self.is_interrupted:
                        break

            def interrupt(self):
                self.is_interrupted = True

            def close(self):
                print("closed", flush=True)

        ignore = lambda *_: None
        feed = Feed(Folding(), window_ns=7, refresh_hz=100, on_snapshot=ignore, on_failure=ignore)
        feed.start()
        has_begun.wait()
        if {is_stopped}:
            feed.stop(timeout_s=0.0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


@pytest.mark.parametrize("kind", ["plain", "history", "judged"])
def test_a_recording_that_is_interrupted_folds_no_more(kind: str) -> None:
    num_folded = 0

    def listen(ring: int, record: Record) -> None:
        nonlocal num_folded
        num_folded += 1
        if num_folded == 100:
            shown.interrupt()

    def opened(sinks: tuple[Sink, ...], ignored: Listener) -> RecordingSource:
        return RecordingSource(SAMPLE, sinks=sinks, listen=listen)

    shown: HistorySource | JudgedSource | RecordingSource
    if kind == "history":
        shown = HistorySource(opened, since_ns=0, until_ns=0, at_ns=None, window_ns=1)
    else:
        shown = opened((), listen)
    if kind == "judged":
        shown = JudgedSource(shown, RunSummarizer())
    snapshot = shown.snapshot(10**9)
    shown.close()
    assert 100 <= num_folded < 200  # a frame may hold several records
    assert snapshot.mode == "replay"


def test_a_change_of_pace_takes_effect_at_once() -> None:
    source, first, second = MovingSource(), threading.Event(), threading.Event()

    def take(snapshot: Snapshot) -> None:
        (second if 9 in source.windows_ns else first).set()

    feed = Feed(
        source, window_ns=7, refresh_hz=0.001, on_snapshot=take, on_failure=lambda reason: None
    )
    feed.start()
    assert first.wait(WAIT_S)
    feed.set_pace(window_ns=9, refresh_hz=0.001)
    assert second.wait(WAIT_S)
    feed.stop()


def test_a_failing_source_is_reported_and_closed() -> None:
    for error, wanted in (
        (UnreadableFile("x.isr is damaged"), "x.isr is damaged"),
        (ValueError("boom"), "ValueError: boom"),
    ):
        reasons: list[str] = []
        failed = threading.Event()

        class Failing(MovingSource):
            def snapshot(self, window_ns: int, error: Exception = error) -> Snapshot | None:
                raise error

        def fail(
            reason: str, reasons: list[str] = reasons, failed: threading.Event = failed
        ) -> None:
            reasons.append(reason)
            failed.set()

        source = Failing()
        feed = Feed(
            source, window_ns=7, refresh_hz=4, on_snapshot=lambda snapshot: None, on_failure=fail
        )
        feed.start()
        assert failed.wait(WAIT_S)
        feed.stop()
        assert reasons == [wanted]
        assert source.is_closed


def test_a_failure_is_on_screen_until_the_next_snapshot() -> None:
    async def scenario() -> None:
        async with screen() as running:
            running.app.post_message(SourceFailed("x.isr is damaged"))
            await running.pilot.pause()
            assert "no new data" in running.lines[0]
            assert "x.isr is damaged" in running.text
            await running.show(moving_snapshot(1))
            assert "no new data" not in running.text

    play(scenario)


@pytest.mark.thorough
def test_the_application_shows_what_its_source_gives_and_closes_it() -> None:
    source = MovingSource(is_moving=False)

    async def scenario() -> None:
        app = InferScopeApp(source, refresh_hz=100)
        async with app.run_test(size=(120, 40)) as pilot:
            while app.scene.snapshot is None:
                await pilot.pause()
            await pilot.press("q")
        assert app.scene.view is not None

    play(scenario)
    assert source.is_closed
    assert source.windows_ns[0] == 60_000_000_000
