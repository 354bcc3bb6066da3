"""Comparison of the engine with a peer, on bursts of known length."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.thorough
def test_ratio_is_the_engine_s_throughput_over_the_peer_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each burst takes the engine 1 s; the peer's take 2, 4, 4 and 2 s."""
    monkeypatch.syspath_prepend("benchmarks")
    benchmark = importlib.import_module("engine_vs_peers")
    order: list[str] = []
    took_s = iter((2, 4, 4, 2))

    def engine(num_streams: int, seed: int) -> int:
        order.append("A")
        return 10**9

    def peer(num_streams: int, seed: int) -> int:
        order.append("B")
        return next(took_s) * 10**9

    row = benchmark.compare(engine, peer, 8, rounds=2)
    assert "".join(order) == "ABBAABBA"
    assert (row["least"], row["ratio"], row["most"], row["pairs"]) == (2.0, 3.0, 4.0, 4)
    num_tokens = 8 * benchmark.NUM_OUTPUT
    assert row["engine_tok_s"] == pytest.approx(num_tokens)
    assert row["peer_tok_s"] == pytest.approx(num_tokens / 3)
