"""Ids and parents: whatever a client sends, the trace that comes out is valid."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inferscope_otlp.identity import Parent, parent_of, span_id_of, trace_id_of
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_VALID = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

hexes = st.sampled_from("0123456789abcdef")


@st.composite
def nearly_valid(draw: st.DrawFn) -> str:
    """Draw a valid header, then damage it in up to two places."""

    def digits(num: int) -> str:
        return draw(st.one_of(st.just("0" * num), st.text(hexes, min_size=num, max_size=num)))

    version = draw(st.sampled_from(["00", "00", "01", "fe", "ff", "0A"]))
    header = f"{version}-{digits(32)}-{digits(16)}-{digits(2)}"
    header += draw(st.sampled_from(["", "", "-", "-more", "more", " ", "\n", "-é"]))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(header)))
        with_ = draw(st.one_of(st.just(""), st.sampled_from("gA- \n\x00٣"), hexes))
        header = header[:at] + with_ + header[at + draw(st.integers(0, 1)) :]
    return header


@given(st.one_of(st.text(max_size=200), nearly_valid()))
def test_a_parent_is_valid_or_none(header: str) -> None:
    parent = parent_of(header)
    if parent is not None:
        assert 0 < parent.trace_id < 1 << 128
        assert 0 < parent.span_id < 1 << 64
        assert header[3:35] == f"{parent.trace_id:032x}"
        assert header[36:52] == f"{parent.span_id:016x}"


@given(nearly_valid())
def test_what_we_accept_opentelemetry_accepts_alike(header: str) -> None:
    parent = parent_of(header)
    if parent is None:
        return
    carried = TraceContextTextMapPropagator().extract({"traceparent": header})
    theirs = get_current_span(carried).get_span_context()
    assert (theirs.trace_id, theirs.span_id) == (parent.trace_id, parent.span_id)
    assert theirs.trace_flags.sampled == parent.is_sampled


@pytest.mark.parametrize(
    ("header", "is_sampled"),
    [
        (_VALID, True),
        (_VALID[:-2] + "00", False),
        (_VALID[:-2] + "03", True),
        ("01" + _VALID[2:], True),
        ("01" + _VALID[2:] + "-later", True),
    ],
)
def test_valid_parents_are_taken(header: str, is_sampled: bool) -> None:
    expected = Parent(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, is_sampled)
    assert parent_of(header) == expected


@pytest.mark.parametrize(
    "header",
    [
        "",
        _VALID + "-",
        _VALID + "\n",
        _VALID.upper(),
        "ff" + _VALID[2:],
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        "01" + _VALID[2:] + "later",
        _VALID[:-1],
    ],
)
def test_malformed_parents_are_none(header: str) -> None:
    assert parent_of(header) is None


names = st.text(max_size=12)


@given(st.tuples(names, names, names), st.tuples(names, names, names))
def test_ids_are_valid_and_those_of_different_spans_differ(
    one: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    for engine_id, request_id, name in (one, other):
        assert 0 < trace_id_of(engine_id, request_id) < 1 << 128
        assert 0 < span_id_of(engine_id, request_id, name) < 1 << 64
    assert (span_id_of(*one) == span_id_of(*other)) is (one == other)
    assert (trace_id_of(*one[:2]) == trace_id_of(*other[:2])) is (one[:2] == other[:2])


def test_ids_do_not_change_between_versions() -> None:
    """Else what is exported again after an upgrade is there twice."""
    assert trace_id_of("engine", "request") == 0x59258C06A2C1B3C748FED4AF7A6C5224
    assert span_id_of("engine", "request", "root") == 0xB32E7F1478C99705
