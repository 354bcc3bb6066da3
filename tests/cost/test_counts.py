from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inferscope.cost.counts import saved_ns
from inferscope.cost.model import StepModel
from tests.attribution.games import any_model, batch_of, decoding_once, step_ns


@example(decoding_once(), 512, 511)
@given(any_model, st.integers(1, 4000), st.integers(0, 4000))
def test_a_cached_beginning_saves_what_its_prompt_takes_less_without_it(
    model: StepModel, prompt_tokens: int, cached_tokens: int
) -> None:
    cached_tokens = min(cached_tokens, prompt_tokens - 1)
    whole_ns = step_ns(model, batch_of([prompt_tokens], [0], [1]), (0,))
    rest = batch_of([prompt_tokens - cached_tokens], [cached_tokens], [1])
    saved = saved_ns(model, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
    if saved is not None:
        assert saved == pytest.approx(max(0.0, whole_ns - step_ns(model, rest, (0,))), abs=1)
