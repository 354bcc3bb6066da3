"""Every token of a vLLM request is in one row, of the phase of its position."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.adapters.vllm.phases import Part, Progress, part_of
from inferscope.records import DECODE, LAST_CHUNK, PREFILL, RECOMPUTED, VERIFY, RequestIndex


@dataclass
class Life:
    """A request as vLLM's scheduler sees it, driven by drawn decisions; an account of it beside."""

    num_prompt: int
    max_outputs: int
    cached: int
    progress: Progress = field(init=False)
    context: int = field(init=False)
    outputs: int = 0
    seen: set[int] = field(default_factory=set)
    counted: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.progress = Progress(RequestIndex(0), self.num_prompt)
        self.context = self.cached

    @property
    def is_over(self) -> bool:
        return self.outputs >= self.max_outputs

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.outputs

    def step(self, budget: int, drafts: int, accepted: int) -> Part:
        """Schedule, execute and update; check each row against the positions it stands for."""
        due = self.num_tokens - self.context
        drafts = drafts if due == 1 else 0
        tokens = min(due, budget) + drafts
        part = part_of(self.progress, context=self.context, tokens=tokens, drafts=drafts)
        self._check(part)
        if due <= budget:
            accepted = min(accepted, drafts, self.max_outputs - self.outputs - 1)
            self.outputs += 1 + accepted
            self.context += tokens - (drafts - accepted)
        else:
            accepted = 0
            self.context += tokens
        self.seen.update(range(self.context))
        part.computed(accepted=accepted)
        return part

    def preempt(self, kept: int) -> None:
        self.context = min(kept, self.context)

    def _check(self, part: Part) -> None:
        at = part.context
        first_draft = part.context + part.tokens - part.drafts
        for row in part.rows:
            assert row.context == at
            assert row.tokens > 0
            for position in range(at, at + row.tokens):
                is_again = position in self.seen and position >= self.cached
                if position >= first_draft:
                    wanted = (VERIFY, 0)
                elif is_again:
                    wanted = (PREFILL, RECOMPUTED)
                else:
                    wanted = (PREFILL if position < self.num_prompt else DECODE, 0)
                assert (row.phase, row.flags & RECOMPUTED) == wanted
                kind = "again" if is_again and wanted[0] == PREFILL else str(wanted[0])
                self.counted[kind] = self.counted.get(kind, 0) + 1
            at += row.tokens
        assert at == part.context + part.tokens


decisions = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 3), st.integers(0, 3), st.integers(0, 9)),
    min_size=300,
    max_size=300,
)


@settings(max_examples=30, deadline=None)
@given(
    num_prompt=st.integers(1, 60),
    outputs=st.integers(1, 30),
    cached=st.integers(0, 60),
    drawn=decisions,
)
def test_every_token_is_counted_once_with_its_phase(
    num_prompt: int, outputs: int, cached: int, drawn: list[tuple[int, int, int, int]]
) -> None:
    life = Life(num_prompt, outputs, min(cached, num_prompt - 1))
    last_chunks = 0
    for budget, drafts, accepted, fate in drawn:
        if life.is_over:
            break
        if fate == 0:
            life.preempt(life.cached)
        part = life.step(budget, drafts, accepted)
        last_chunks += sum(bool(row.flags & LAST_CHUNK) for row in part.rows)
    counted = life.counted
    if life.is_over:
        assert counted[str(PREFILL)] == num_prompt - life.cached
        # Of the outputs the last one is never computed; accepted drafts were, as verify.
        accepted_drafts = counted.get(str(VERIFY), 0) - life.progress.rejected
        assert counted.get(str(DECODE), 0) + accepted_drafts == outputs - 1
        assert last_chunks >= 1


def test_a_plain_life_has_the_rows_one_expects() -> None:
    progress = Progress(RequestIndex(3), 10)
    first = part_of(progress, context=4, tokens=4, drafts=0)
    assert [tuple(row) for row in first.rows] == [(PREFILL, 4, 4, 0, 1)]
    first.computed(accepted=0)
    rest = part_of(progress, context=8, tokens=2, drafts=0)
    assert [tuple(row) for row in rest.rows] == [(PREFILL, 2, 8, LAST_CHUNK, 1)]
    rest.computed(accepted=0)
    decode = part_of(progress, context=10, tokens=1, drafts=0)
    assert [tuple(row) for row in decode.rows] == [(DECODE, 1, 10, 0, 1)]


def test_what_was_lost_to_a_preemption_is_recomputed_and_the_new_token_is_not() -> None:
    progress = Progress(RequestIndex(0), 4)
    part_of(progress, context=0, tokens=4, drafts=0).computed(accepted=0)
    part_of(progress, context=4, tokens=1, drafts=0).computed(accepted=0)
    again = part_of(progress, context=0, tokens=6, drafts=0)
    assert [tuple(row) for row in again.rows] == [
        (PREFILL, 5, 0, RECOMPUTED | LAST_CHUNK, 0),
        (DECODE, 1, 5, 0, 1),
    ]


def test_a_step_planned_before_drafts_were_judged_is_set_right_afterwards() -> None:
    progress = Progress(RequestIndex(0), 4)
    part_of(progress, context=0, tokens=4, drafts=0).computed(accepted=0)
    judged = part_of(progress, context=4, tokens=4, drafts=3)
    hopeful = part_of(progress, context=8, tokens=4, drafts=3)
    assert [row.phase for row in judged.rows] == [DECODE, VERIFY]
    judged.computed(accepted=1)
    assert hopeful.true_context == 6
    hopeful.computed(accepted=3)
    assert progress.ever == 10
    assert part_of(progress, context=10, tokens=1, drafts=0).true_context == 10
