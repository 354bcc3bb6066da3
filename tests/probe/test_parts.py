from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.probe.part_labels import (
    MOST_PARTS,
    MOST_RECORDED_PARTS,
    bounded,
    is_name,
    read_header,
)
from inferscope.records import RequestEvent, decode, encode
from tests.probe.fakes import FakeClock, make_probe, of

PARTS = st.lists(st.tuples(st.text(max_size=40), st.integers(-(2**70), 2**70)), max_size=300)
GOOD = st.lists(
    st.tuples(st.from_regex(r"[a-z_]{1,32}", fullmatch=True), st.integers(1, 10**9 - 1)),
    min_size=1,
    max_size=MOST_PARTS,
)


def test_a_header_names_parts_in_the_order_of_the_prompt() -> None:
    read = read_header(b"system=120, retrieved=3000,user=20")
    assert read == (("system", 120), ("retrieved", 3000), ("user", 20))


@given(GOOD)
def test_what_a_client_writes_is_what_is_read_but_for_neighbours_of_one_name(
    parts: list[tuple[str, int]],
) -> None:
    header = ",".join(f"{name}={tokens}" for name, tokens in parts).encode()
    read = read_header(header)
    assert len(header) > 1024 or read is not None
    if read is not None:
        assert sum(tokens for _, tokens in read) == sum(tokens for _, tokens in parts)
        assert [name for name, _ in read] == [
            name for at, (name, _) in enumerate(parts) if not at or parts[at - 1][0] != name
        ]


@pytest.mark.parametrize(
    "header",
    [b"", b"system", b"system=", b"system=-1", b"system=1.5", b"system=1;user=2", b"system=1,",
     b"system=1=2", "system=\u0662".encode(), b"system=1234567890", b"a=1," * 16 + b"a=1",
     b"a" * 1023 + b"=1"],
)  # fmt: skip
def test_a_header_that_cannot_be_read_is_ignored(header: bytes) -> None:
    assert read_header(header) is None


@given(st.one_of(st.binary(max_size=1100), st.from_regex(rb"([a-zA-Z_ ]{0,9}=\d{0,10},?){0,20}")))
def test_no_header_raises_and_none_reveals_more_than_names_and_numbers(header: bytes) -> None:
    read = read_header(header)
    if read is not None:
        assert len(read) <= MOST_PARTS
        assert all(is_name(name) and 0 < tokens < 10**9 for name, tokens in read)


@pytest.mark.parametrize("name", ["", "Retrieved", "my chunk", "a" * 33, "caf\xe9", "a1", "\ud800"])
def test_a_name_that_is_none_becomes_other(name: str) -> None:
    assert bounded([(name, 5)]) == (("other", 5),)


@given(PARTS)
def test_bounded_parts_fit_a_record(parts: list[tuple[str, int]]) -> None:
    kept = bounded(parts)
    assert len(kept) <= MOST_RECORDED_PARTS
    assert bounded(kept) == kept
    event = RequestEvent(1, 2, 3, 4, prompt_parts=kept)
    assert decode(event.CODE, encode(event)) == event


@given(st.integers(0, 400))
def test_of_too_many_parts_no_token_is_lost_and_the_last_keep_their_names(num: int) -> None:
    parts = [("user" if at % 2 else "history", at + 1) for at in range(num)]
    kept = bounded(parts)
    assert sum(tokens for _, tokens in kept) == sum(range(num + 1))
    assert kept[-100:] == tuple(parts[-100:])
    assert kept[:1] == tuple(parts[:1])


def test_parts_are_recorded_at_receipt_or_with_the_tokens_and_never_as_text(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock())
    canary = "canary in a coal mine"
    index = probe.received("a", prompt_parts=(("system", 3), (canary, 4)))
    probe.tokenised(index, 9, prompt_parts=((canary.upper(), 2), ("user", 7)))
    probe.tokenised(index, 9)
    path = probe.path
    probe.close()
    assert path is not None
    assert [event.prompt_parts for event in of(RequestEvent, path)] == [
        (("system", 3), ("other", 4)),
        (("other", 2), ("user", 7)),
        (),
    ]
    assert canary.encode() not in path.read_bytes().lower()
