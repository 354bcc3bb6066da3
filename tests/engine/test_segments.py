from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferscope.engine.scheduler import Slice
from inferscope.engine.segments import StepColumns, step_columns
from inferscope.records import DECODE, LAST_CHUNK, PREFILL, RECOMPUTED
from tests.engine.steps import make_request


def slice_of(
    *, num_prompt: int, num_output: int, ever_computed: int, context: int, num_tokens: int
) -> Slice:
    request = make_request(3, [0] * num_prompt)
    request.tokens += [0] * num_output
    request.computed, request.ever_computed = context, ever_computed
    is_sampled = context + num_tokens == len(request.tokens)
    return Slice(request=request, context=context, num_tokens=num_tokens, is_sampled=is_sampled)


def row_tuples(rows: StepColumns) -> list[tuple[int, int, int, int, int]]:
    columns = (rows.phases, rows.contexts, rows.tokens, rows.flags, rows.sampled)
    return list(zip(*columns, strict=True))


def test_whole_prompt_is_one_last_chunk() -> None:
    part = slice_of(num_prompt=9, num_output=0, ever_computed=0, context=0, num_tokens=9)
    assert row_tuples(step_columns([part])) == [(PREFILL, 0, 9, LAST_CHUNK, 1)]


def test_first_chunk_of_a_prompt_samples_nothing() -> None:
    part = slice_of(num_prompt=9, num_output=0, ever_computed=0, context=0, num_tokens=5)
    assert row_tuples(step_columns([part])) == [(PREFILL, 0, 5, 0, 0)]


def test_generated_token_is_decode() -> None:
    part = slice_of(num_prompt=9, num_output=3, ever_computed=11, context=11, num_tokens=1)
    assert row_tuples(step_columns([part])) == [(DECODE, 11, 1, 0, 1)]


def test_resumed_decode_is_a_recomputed_row_and_a_decode_row() -> None:
    part = slice_of(num_prompt=9, num_output=3, ever_computed=11, context=4, num_tokens=8)
    assert row_tuples(step_columns([part])) == [
        (PREFILL, 4, 7, RECOMPUTED | LAST_CHUNK, 0),
        (DECODE, 11, 1, 0, 1),
    ]


def test_prompt_lost_halfway_is_a_recomputed_row_and_a_fresh_row() -> None:
    part = slice_of(num_prompt=9, num_output=0, ever_computed=4, context=0, num_tokens=9)
    assert row_tuples(step_columns([part])) == [
        (PREFILL, 0, 4, RECOMPUTED, 0),
        (PREFILL, 4, 5, LAST_CHUNK, 1),
    ]


@given(data=st.data(), num_prompt=st.integers(1, 12), num_output=st.integers(0, 6))
def test_rows_partition_a_slice(data: st.DataObject, num_prompt: int, num_output: int) -> None:
    num_known = num_prompt + num_output
    context = data.draw(st.integers(0, num_known - 1))
    part = slice_of(
        num_prompt=num_prompt,
        num_output=num_output,
        context=context,
        num_tokens=data.draw(st.integers(1, num_known - context)),
        ever_computed=data.draw(st.integers(context, num_known - 1)),
    )
    rows = step_columns([part])
    position = context
    for start, num_tokens in zip(rows.contexts, rows.tokens, strict=True):
        assert start == position
        assert num_tokens > 0
        position += num_tokens
    assert position == context + part.num_tokens
    assert sum(rows.sampled) == part.is_sampled
    assert sum(rows.sampled[:-1]) == 0
    assert len(rows.requests) <= 3
