from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inferscope.load.sse import EndlessEvent, SseParser

lines = st.lists(
    st.one_of(
        st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=6).map(
            lambda text: f"data:{text}"
        ),
        st.sampled_from(["", "", ": note", "data", "data: ", "data:  x", "event: e", "id", "é: ü"]),
    ),
    max_size=14,
)
ends = st.sampled_from(["\n", "\r", "\r\n"])


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Draw a stream of events with line ends of all kinds, possibly cut off."""
    text = "".join(line + draw(ends) for line in draw(lines))
    return (
        draw(st.sampled_from(["", "\ufeff"])) + text + draw(st.sampled_from(["", "data: t"]))
    ).encode()


def by_the_book(stream: bytes) -> list[bytes]:
    """Read a whole stream by the standard's prose, character by character."""
    text = stream.decode().removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    *whole, _ = text.split("\n")
    events, buffer = [], ""
    for line in whole:
        if line == "":
            if buffer != "":
                events.append(buffer[:-1].encode())
            buffer = ""
        elif line.startswith(":"):
            pass
        else:
            name, _, value = line.partition(":")
            if name == "data":
                buffer += (value[1:] if value.startswith(" ") else value) + "\n"
    return events


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    """Cut a stream at places, given modulo its length."""
    edges = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    return [stream[start:end] for start, end in itertools.pairwise(edges)]


@given(streams(), st.lists(st.integers(0, 1000), max_size=20))
@example(b"data: a\r\n\r\ndata: b\r\n\r\n", [8, 9, 10])
@example("data: 統\n\n".encode(), [6, 7, 8, 9])
def test_events_are_those_of_the_standard_wherever_it_is_cut(
    stream: bytes, places: list[int]
) -> None:
    parser = SseParser()
    assert [event for piece in cut(stream, places) for event in parser.feed(piece)] == by_the_book(
        stream
    )


@given(streams())
def test_byte_by_byte_is_no_different(stream: bytes) -> None:
    parser = SseParser()
    found = [event for at in range(len(stream)) for event in parser.feed(stream[at : at + 1])]
    assert found == by_the_book(stream)


def test_an_event_is_there_with_the_byte_that_completes_it() -> None:
    parser = SseParser()
    assert parser.feed(b"data: x\r\n\r") == [b"x"]
    assert parser.feed(b"\n") == []
    assert parser.feed(b"data: y\n\n") == [b"y"]


@given(st.text(), st.integers(1, 9))
def test_text_of_all_planes_survives_json_in_pieces(text: str, size: int) -> None:
    stream = f"data: {json.dumps({'t': text}, ensure_ascii=False)}\n\n".encode(
        errors="surrogatepass"
    )
    parser = SseParser()
    found = []
    for start in range(0, len(stream), size):
        found += parser.feed(stream[start : start + size])
    (data,) = found
    assert json.loads(data.decode(errors="surrogatepass")) == {"t": text}


@pytest.mark.parametrize("piece", [b"data: " + b"x" * 30, b"x" * 40, b"data: 1234\n", b"data:\n"])
def test_an_event_without_an_end_is_not_hoarded(piece: bytes) -> None:
    parser = SseParser(most_bytes=100)
    with pytest.raises(EndlessEvent):
        list(map(parser.feed, itertools.repeat(piece, 200)))


def test_long_streams_of_short_events_are_within_the_bound() -> None:
    parser = SseParser(most_bytes=100)
    assert sum(len(parser.feed(b"data: 0123456789\n\n")) for _ in range(100)) == 100
