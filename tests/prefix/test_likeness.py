"""Laws of the comparison of prompts, against one that compares token by token."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.prefix import Likeness, PromptHistory
from inferscope.prefix.anchors import AnchorFinder
from inferscope.prefix.generations import Generations
from inferscope.prefix.likeness import LEAST_SPAN, num_equal, num_equal_before
from inferscope.records import LORA, SALT

KEY = random.Random(11)


def text(num_tokens: int) -> list[int]:
    return [KEY.randrange(150_000) for _ in range(num_tokens)]


def history() -> PromptHistory:
    return PromptHistory(finder=AnchorFinder(random.Random(3)))


def compare(seen: PromptHistory, *prompts: list[int]) -> Likeness | None:
    found = None
    for index, prompt in enumerate(prompts):
        found = seen.compare(index, seen.raw(prompt))
    return found


def test_a_new_prompt_is_like_none() -> None:
    assert compare(history(), text(300), text(300)) is None


def test_an_edited_token_is_named_and_everything_behind_it_is_equal_again() -> None:
    for at in (0, 1, 5, 37, 150, 299):
        first = text(300)
        second = [*first[:at], 7, *first[at + 1 :]]
        found = compare(history(), first, second)
        if at == 299:
            assert found == Likeness(0, 299, None, 0, [], 0)
        else:
            assert found == Likeness(0, at, at + 1, 0, [(at + 1, 300)], 0)


@pytest.mark.parametrize("num_left", [LEAST_SPAN - 1, LEAST_SPAN, 100])
def test_a_common_end_is_found_without_an_anchor_in_it(num_left: int) -> None:
    first = text(800)
    at = 800 - num_left - 1
    spans = [(at + 1, 800)] if num_left >= LEAST_SPAN else []
    for key in range(40):
        seen = PromptHistory(finder=AnchorFinder(random.Random(key)))
        found = compare(seen, first, [*first[:at], 7, *text(3), *first[at + 1 :]])
        assert found is not None
        assert found.diverged_at == at
        assert found.spans == [(start + 3, end + 3) for start, end in spans]
        assert found.shift == (3 if spans else 0)


def test_a_copy_does_not_hide_the_prompt_that_it_is_of() -> None:
    first = text(200)
    copies = [[*first[:at], 7, *first[at + 1 :]] for at in (100, 90, 120)]
    found = compare(history(), first, *copies, [*first, *text(50)])
    assert found == Likeness(0, 200, None, 0, [], 0)


def test_inserted_tokens_shift_what_is_behind_them() -> None:
    first = text(400)
    second = [*first[:37], *text(11), *first[37:]]
    assert compare(history(), first, second) == Likeness(0, 37, 48, 11, [(48, 411)], 0)
    third = [*first[:100], *first[120:]]
    assert compare(history(), first, third) == Likeness(0, 100, 100, -20, [(100, 380)], 0)


def test_a_header_that_changes_leaves_one_span() -> None:
    body = text(500)
    found = compare(history(), [*text(9), *body], [*text(9), *body])
    assert found == Likeness(0, 0, 9, 0, [(9, 509)], 0)


def test_reordered_documents_are_spans_of_whatever_prompts_held_them() -> None:
    system, *documents = text(80), text(200), text(300), text(250)
    seen = history()
    seen.compare(0, seen.raw([*system, *documents[0], *documents[1]]))
    seen.compare(1, seen.raw([*text(60), *documents[2]]))
    prompt = [*system, *documents[1], *documents[2], *documents[0]]
    found = seen.compare(2, seen.raw(prompt))
    assert found is not None
    assert (found.earlier, found.diverged_at) == (0, 80)
    assert found.spans == [(80, 380), (380, 630), (630, 830)]
    assert (found.equal_again_at, found.shift) == (80, -200)


def test_a_next_turn_diverges_at_the_end_of_the_last_one() -> None:
    first = text(200)
    found = compare(history(), first, [*first, *text(100)])
    assert found == Likeness(0, 200, None, 0, [], 0)


@pytest.mark.parametrize(
    ("namespace", "differs"), [((5, 0, 0), SALT), ((0, 6, 0), LORA), ((5, 6, 0), SALT | LORA)]
)
def test_equal_prompts_of_two_namespaces_name_what_differs(
    namespace: tuple[int, int, int], differs: int
) -> None:
    seen, prompt = history(), text(100)
    seen.compare(0, seen.raw(prompt))
    found = seen.compare(1, seen.raw(prompt), namespace)
    assert found == Likeness(0, 100, None, 0, [], differs)


def test_of_equally_long_prefixes_that_of_the_same_namespace_is_named() -> None:
    seen, stem = history(), text(600)
    seen.compare(0, seen.raw([*stem, *text(600)]), (5, 0, 0))
    seen.compare(1, seen.raw([*stem, *text(10)]))
    seen.compare(2, seen.raw([*text(1), *stem[:300]]), (5, 0, 0))
    found = seen.compare(3, seen.raw([*stem, *text(50)]), (5, 0, 0))
    assert found is not None
    assert found.diverged_at == 600
    # Anchors name the newest prompt that holds them: the other one may have none left.
    assert found.differs in (0, SALT)


words = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@settings(max_examples=150)
@given(st.lists(words, min_size=2, max_size=6), st.integers(1, 60))
def test_spans_are_equal_text_in_order_and_do_not_overlap(
    prompts: list[list[int]], num_tokens: int
) -> None:
    pieces = {word: random.Random(word).choices(range(1000), k=num_tokens) for word in range(4)}
    seen = history()
    texts = [[token for word in prompt for token in pieces[word]] for prompt in prompts]
    held = {tuple(one[at : at + LEAST_SPAN]) for one in texts[:-1] for at in range(len(one))}
    for index, prompt in enumerate(texts):
        found = seen.compare(index, seen.raw(prompt))
    if found is None:
        return
    earlier, last = texts[found.earlier], texts[-1]
    common = next(
        (at for at, pair in enumerate(zip(earlier, last, strict=False)) if pair[0] != pair[1]),
        min(len(earlier), len(last)),
    )
    assert found.diverged_at == common
    end = common
    for start, stop in found.spans:
        assert end <= start <= stop - LEAST_SPAN
        assert stop <= len(last)
        assert tuple(last[start : start + LEAST_SPAN]) in held
        end = stop
    if found.equal_again_at is not None:
        at = found.equal_again_at
        assert last[at : at + LEAST_SPAN] == earlier[at - found.shift :][:LEAST_SPAN]


@given(st.data())
def test_runs_of_equal_bytes_are_counted_in_whole_tokens(data: st.DataObject) -> None:
    cells = st.lists(st.integers(0, 1), max_size=300)
    left, right = (array("I", data.draw(cells)).tobytes() for _ in range(2))
    at, from_ = (4 * data.draw(st.integers(0, len(side) // 4)) for side in (left, right))
    floor = 4 * data.draw(st.integers(0, at // 4))
    ahead = 0
    while left[at + ahead :][:4] == right[from_ + ahead :][:4] != b"":
        ahead += 4
    assert num_equal(left, at, right, from_) == ahead
    back = 0
    while (
        back < min(at - floor, from_)
        and left[at - back - 4 : at - back] == right[from_ - back - 4 : from_ - back]
    ):
        back += 4
    assert num_equal_before(left, at, floor, right, from_) == back


def test_tokens_and_anchors_held_stay_below_their_bounds() -> None:
    seen = PromptHistory(most_tokens=10_000, most_anchors=500)
    for index in range(300):
        seen.compare(index, seen.raw(text(400)))
        assert seen.num_tokens <= 10_000
        assert seen.num_anchors <= 500
    huge = text(50_000)
    seen.compare(300, seen.raw(huge))
    assert seen.num_tokens == 50_000  # one prompt is always held, up to `MOST_COMPARED`
    assert len(seen.raw([1] * 200_000)) == 4 * 131_072


def test_short_prompts_are_bounded_by_their_number() -> None:
    seen = PromptHistory(most_prompts=50)
    for index in range(300):
        seen.compare(index, seen.raw(text(12)))
        assert seen.num_prompts == min(index + 1, 50)
    known = text(12)
    seen.compare(300, seen.raw(known))
    for index in range(301, 400):  # too short for an anchor: none could find them
        assert seen.compare(index, seen.raw(text(7))) is None
    found = seen.compare(400, seen.raw(known))
    assert found is not None
    assert (found.earlier, seen.num_prompts) == (300, 50)


def test_text_of_one_repeated_token_has_few_anchors() -> None:
    for seed in range(40):
        finder = AnchorFinder(random.Random(seed))
        raw = array("I", [9] * 20_000).tobytes()
        assert len(finder.positions(raw)) <= 20_000 // 4 + 3 * 64


@given(st.lists(st.integers(0, 2**32 - 1), max_size=60), st.integers(0, 20))
def test_equal_text_has_equal_anchors_wherever_it_stands(tokens: list[int], shift: int) -> None:
    finder = AnchorFinder(random.Random(1))
    alone = finder.positions(array("I", tokens).tobytes())
    moved = finder.positions(array("I", [5] * shift + tokens).tobytes())
    expected = {at + shift for at in alone if at}
    found = {at for at in moved if at > shift}
    assert found == expected


def test_prompts_too_short_to_be_found_again_are_not_held() -> None:
    seen = PromptHistory()
    for index in range(10):
        assert seen.compare(index, seen.raw([1, 2, 3])) is None
        assert seen.compare(index, b"") is None
    assert seen.num_prompts == 0


def test_an_interrupt_while_a_prompt_is_added_leaves_a_whole_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = PromptHistory(most_tokens=60)
    prompts = [text(20) for _ in range(40)]

    def interrupted(self: object, key: int, value: int) -> None:
        put(self, key, value)  # type: ignore[arg-type]
        raise TimeoutError  # of a signal handler

    put = Generations.put
    for index, prompt in enumerate(prompts * 2):
        if index % 3:
            seen.compare(index, seen.raw(prompt))
            continue
        with monkeypatch.context() as during:
            during.setattr(Generations, "put", interrupted)
            with pytest.raises(TimeoutError):
                seen.compare(index, seen.raw(prompt))
        seen.compare(index, seen.raw(prompt))
