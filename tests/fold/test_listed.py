"""Rows and quantiles of a window, which describe the same requests for any window."""

from __future__ import annotations

import pytest

from inferscope.fold.final_records import FinalRequest, FinalStep
from inferscope.fold.snapshots import EngineView
from inferscope.fold.view import snapshot
from inferscope.readers.source import open_source
from inferscope.records import Record, Tick
from inferscope.text.labels import format_listed
from tests.insight.test_why import SAMPLE

SECOND_NS = 1_000_000_000
WINDOWS_S = (1, 5, 10, 60, 300)


class Looks:
    """Views of the sample over several windows, one for every other second of it."""

    def __init__(self) -> None:
        self.finished: list[FinalRequest] = []
        self.views: list[tuple[int, EngineView, list[FinalRequest]]] = []
        self._next_ns = 0
        self._source = open_source(SAMPLE, sinks=(self,), listen=self._listen)
        self._source.advance()
        self._look()
        self._source.close()

    def on_step(self, step: FinalStep) -> None:
        """Ignore a step."""

    def on_request(self, request: FinalRequest) -> None:
        self.finished.append(request)

    def _listen(self, ring: int, record: Record) -> None:
        if isinstance(record, Tick) and record.t_ns >= self._next_ns:
            self._next_ns = record.t_ns + 2 * SECOND_NS
            self._look()

    def _look(self) -> None:
        for window_s in WINDOWS_S:
            look = snapshot(self._source.collector, window_ns=window_s * SECOND_NS, mode="replay")
            for view in look.engines:
                self.views.append((window_s, view, list(self.finished)))


@pytest.fixture(scope="module")
def looks() -> Looks:
    return Looks()


def since_ns(window_s: int, view: EngineView) -> int:
    """Return when the first second of a window began."""
    return (view.folded_ns // SECOND_NS - len(view.series.running) + 1) * SECOND_NS


@pytest.mark.thorough
def test_the_rows_are_what_is_alive_and_what_finished_in_the_window(looks: Looks) -> None:
    assert len(looks.views) > 50
    for window_s, view, finished in looks.views:
        from_ns = since_ns(window_s, view)
        wanted = [one.request_id for one in finished if one.delivered_ns >= from_ns]
        alive = view.requests[: view.num_requests]
        assert [row.request_id for row in view.requests[len(alive) :]] == wanted[::-1]
        assert len(wanted) == view.num_finished_since == view.e2e.num
        assert view.listed_ns == view.window_ns
        assert f"{len(wanted)} done in" in format_listed(view)


@pytest.mark.thorough
def test_each_first_token_of_the_window_has_its_row_and_the_quantiles_are_theirs(
    looks: Looks,
) -> None:
    num_with = 0
    for window_s, view, _ in looks.views:
        from_ns = since_ns(window_s, view)
        ttfts_ns = sorted(
            row.ttft_ns
            for row in view.requests
            if row.ttft_ns is not None and row.arrived_ns + row.ttft_ns >= from_ns
        )
        assert view.ttft.num == len(ttfts_ns)
        if ttfts_ns:
            num_with += 1
            assert view.ttft.max_ns == ttfts_ns[-1]
            assert view.ttft.mean_ns == pytest.approx(sum(ttfts_ns) / len(ttfts_ns))
    assert num_with > 20
