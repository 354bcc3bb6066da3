from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.errors import BadInput
from inferscope.tui.filters import parse_filter
from tests.tui.scenes import requests


def matching(text: str) -> set[str | None]:
    wanted = parse_filter(text)
    return {row.external_id for row in requests() if wanted.matches(row)}


def test_every_term_must_be_met() -> None:
    assert matching("state:decode p99>30 id:rag*") == {"rag-018c", "rag-0188"}


def test_an_empty_filter_matches_everything() -> None:
    assert len(matching("  ")) == len(requests())


def test_comparisons_read_milliseconds_and_counts() -> None:
    assert matching("ttft>200") == {"rag-0188"}
    assert matching("out>=412") == {"chat-7f3a"}
    assert matching("preempted=1") == {"rag-018a"}
    assert matching("e2e<1000 finish:client_cancel") == {"batch-cut"}


def test_unknown_meets_no_comparison() -> None:
    assert "rag-0191" not in matching("ttft<1000000") | matching("ttft>=0") | matching("ttft!=1")


def test_words_match_by_pattern_alternatives_and_negation() -> None:
    assert matching("state:waiting,held") == {"chat-7f60", "chat-7f61", "rag-018a"}
    assert matching("!state:decode,done,waiting") == {"rag-0191", "rag-018a"}
    assert matching("state!=decode id:rag*") == {"rag-0191", "rag-018a", "rag-0177"}


def test_a_bare_word_looks_in_the_id() -> None:
    assert matching("AGENT") == {"agent-c1", "agent-c2"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour:red", "no field 'colour'"),
        ("p99>fast", "'fast' in filter term 'p99>fast' is not a number"),
        ("p99>", "has no value"),
        ("state>decode", "compares a word; write it like state:decode"),
    ],
)
def test_a_bad_filter_states_which_term_and_what_would_do(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message.replace("(", r"\(")):
        parse_filter(text)


@given(st.text(max_size=40))
def test_any_text_is_a_filter_or_bad_input(text: str) -> None:
    with contextlib.suppress(BadInput):
        assert parse_filter(text).matches(requests()[0]) in (True, False)


@pytest.mark.parametrize("text", ["state:foo", "state:decode,foo", "!state:foo", "state!=foo"])
def test_a_state_that_does_not_exist_is_refused_with_those_that_do(text: str) -> None:
    with pytest.raises(BadInput, match="no state is called 'foo'; states are arriving waiting"):
        parse_filter(text)
    assert parse_filter("state:de*,held").predicates
