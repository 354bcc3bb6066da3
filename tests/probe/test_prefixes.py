from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferscope.probe.prefixes import PrefixDigests
from inferscope.records import PREFIX_TOKENS

prompts = st.builds(
    lambda first, num: [first] * num, st.integers(0, 200_000), st.integers(0, 1_500)
)


@given(prompts, st.lists(st.integers(0, 200_000), max_size=50))
def test_prompts_that_begin_alike_have_the_digests_of_their_common_beginning(
    beginning: list[int], end: list[int]
) -> None:
    digests = PrefixDigests()
    common = sum(len(beginning) >= num_tokens for num_tokens in PREFIX_TOKENS)
    assert len(digests.of(beginning)) == common
    assert digests.of(beginning + end)[:common] == digests.of(beginning)


@given(st.lists(st.integers(0, 200_000), min_size=64, max_size=300), st.integers(0, 63))
def test_one_other_token_is_another_beginning(prompt: list[int], at: int) -> None:
    digests = PrefixDigests()
    other = [*prompt[:at], prompt[at] + 1, *prompt[at + 1 :]]
    assert not set(digests.of(prompt)) & set(digests.of(other))


def test_another_process_has_other_digests_so_that_texts_cannot_be_tried() -> None:
    prompt = list(range(1_024))
    assert not set(PrefixDigests().of(prompt)) & set(PrefixDigests().of(prompt))
    assert len(PrefixDigests().of(prompt)) == len(PREFIX_TOKENS)


def test_token_ids_out_of_range_do_not_fail() -> None:
    assert len(PrefixDigests().of([-1, 2**40] * 32)) == 1
