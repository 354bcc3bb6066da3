"""Shares of members in a run with few steps, before the cost model has learned from many.

The times are those of a small model that SGLang serves on a CPU: a prompt of 13 tokens takes 70 to
120 ms alone, and 2.7 s beside the decode of a request with a context of 3,300.
"""

from __future__ import annotations

from collections import Counter

import pytest
from inferscope_jsonl.exporter import step_row

from inferscope.fold.view import snapshot
from tests.fold.scripts import MS, Finals, Ring, Script, assert_all_closes

MIXED_MS = 2_700.0


class Run:
    """Script of consecutive steps."""

    def __init__(self) -> None:
        self.script = Script()
        self.core: Ring = self.script.ring()
        self.at_ms = 1.0
        self.step = 0

    def request(self, name: str) -> int:
        self.script.at(self.at_ms)
        index = self.core.queued(name)
        self.core.admitted(index)
        return index

    def run(self, rows: list[tuple[int, int, int]], took_ms: float) -> None:
        self.core.step(self.step, rows, start_ms=self.at_ms, end_ms=self.at_ms + took_ms)
        self.at_ms += took_ms + 0.5
        self.step += 1

    def end(self, index: int) -> None:
        self.script.at(self.at_ms)
        self.core.finished(index)


def played(*, decoded_alone: int, warm: bool = True, num_rounds: int = 1) -> tuple[Finals, float]:
    """Fold warm-up prompts, a long prompt in chunks, its decodes, and a short prompt beside one.

    Args:
        decoded_alone: steps that the long request decodes by itself before the short one comes.
        warm: whether short prompts ran alone before.
        num_rounds: of all of it.

    Returns:
        what is final, and the share of step time that was bounded.
    """
    run = Run()
    for turn in range(num_rounds):
        for n, took_ms in enumerate((70, 120, 95) if warm else ()):
            mine = run.request(f"warm{turn}-{n}")
            run.run([(mine, 13, 0)], took_ms)
            for context in range(13, 17):
                run.run([(mine, 1, context)], 55)
            run.end(mine)
        big = run.request(f"big{turn}")
        run.run([(big, 2048, 0)], 3_200)
        run.run([(big, 1252, 2048)], 2_100)
        context = 3300
        for _ in range(decoded_alone):
            run.run([(big, 1, context)], 110)
            context += 1
        victim = run.request(f"victim{turn}")
        run.run([(big, 1, context), (victim, 13, 0)], MIXED_MS)
        for n in range(6):
            run.run([(big, 1, context + 1 + n), (victim, 1, 13 + n)], 120)
        run.end(big)
        run.end(victim)
    collector, finals = run.script.play(until_ms=run.at_ms + 2_000)
    assert_all_closes(collector, finals)
    view = snapshot(collector, window_ns=10**9, mode="ended").engines[0]
    return finals, view.cost_models[0].bounded_share


def ledger(finals: Finals, name: str) -> Counter[str]:
    (final,) = [final for final in finals.requests if final.request_id == name]
    return Counter(final.ttft_ledger_ns)


@pytest.mark.parametrize("decoded_alone", [0, 5])
@pytest.mark.parametrize("num_rounds", [1, 4])
def test_short_prompt_is_not_charged_more_than_it_takes_alone(
    decoded_alone: int, num_rounds: int
) -> None:
    finals, bounded_share = played(decoded_alone=decoded_alone, num_rounds=num_rounds)
    for turn in range(num_rounds):
        row = ledger(finals, f"victim{turn}")
        assert row["prefill_own"] <= 1.25 * 120 * MS
    mixed = [step_row(s) for s in finals.steps if len(s.request_ids) == 2 and sum(s.tokens) == 14]
    assert len(mixed) == num_rounds
    assert all(0 < row["bounded_ns"] <= row["measured_ns"] for row in mixed[:1])
    assert bounded_share > 0.05


def test_excess_goes_to_the_other_phase_if_nothing_contradicts_it() -> None:
    """Charge the decode if none with such a context ran alone: it may have made the step long."""
    finals, _ = played(decoded_alone=0)
    row = ledger(finals, "victim0")
    assert row["prefill_interference"] >= 0.9 * MIXED_MS * MS
    (victim,) = [final for final in finals.requests if final.request_id == "victim0"]
    blamed = {
        request_id: ns for cause, request_id, ns in victim.blame if cause == "prefill_interference"
    }
    assert blamed["big0"] >= 0.9 * MIXED_MS * MS


def test_excess_is_slowdown_if_both_members_are_known_to_be_short() -> None:
    finals, _ = played(decoded_alone=5)
    row = ledger(finals, "victim0")
    assert row["slowdown"] >= 0.85 * MIXED_MS * MS
    assert row["prefill_own"] + row["prefill_interference"] <= 1.26 * (120 + 110) * MS
