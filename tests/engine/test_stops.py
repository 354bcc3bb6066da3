from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferscope.engine.stops import StopSearch

_TEXTS = st.text(alphabet="ab\n", max_size=24)
_STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=3)


@given(pieces=st.lists(_TEXTS, max_size=8), stops=_STOPS)
def test_the_text_shown_is_the_whole_text_up_to_the_first_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    search = StopSearch(stops)
    shown, fed = "", ""
    for piece in pieces:
        shown += search.push(piece)
        fed += piece
        assert not any(stop in shown for stop in stops)
        if search.is_found:
            break
    ends = [at for stop in stops if (at := fed.find(stop)) >= 0]
    assert search.is_found == bool(ends)
    if not ends:
        assert shown + search.finish() == fed
    else:
        assert fed.startswith(shown)
        assert any(fed.startswith(stop, len(shown)) for stop in stops)


def test_text_is_held_back_only_while_it_may_be_a_stop_string() -> None:
    search = StopSearch(["\n\nEND"])
    assert search.push("one\n") == "one"
    assert search.push("two") == "\ntwo"
    assert search.push("\n\nE") == ""
    assert search.push("ND more") == ""
    assert search.is_found
    assert search.push("more") == ""
