"""A wrapped send behaves as the bare one under whatever an event loop sends or throws into it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.adapters.edge import _Sending


class Cancelled(BaseException):
    pass


class Steps:
    """Awaits three times; keeps what it was sent, and takes one cancellation for an answer."""

    def __await__(self) -> Generator[Any, Any, list[Any]]:
        first = yield 1
        try:
            second = yield 2
        except ValueError as error:
            second = str(error)
            yield "caught"
        return [first, second, (yield 3)]


class Plain:
    """Steps that are a bare iterator: nothing can be sent or thrown into them."""

    def __init__(self) -> None:
        self.left = [1, 2, 3]

    def __await__(self) -> Plain:
        return self

    def __iter__(self) -> Plain:
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration("done")
        return self.left.pop()


async def within(steps: Awaitable[Any]) -> Any:
    return await steps


def trace(steps: Coroutine[Any, Any, Any], acts: list[tuple[str, Any]]) -> list[Any]:
    """Return what comes of each act, to the end."""
    outcomes: list[Any] = []
    try:
        for name, value in acts:
            outcomes.append(getattr(steps, name)(*value))
    except StopIteration as end:
        return [*outcomes, ("returned", end.value)]
    except BaseException as error:
        return [*outcomes, (type(error), str(error).replace("_Sending", "Plain"))]
    steps.close()
    return outcomes


ACTS = st.one_of(
    st.just(("send", (None,))),
    st.integers(0, 9).map(lambda value: ("send", (value,))),
    st.just(("throw", (ValueError("into"),))),
    st.just(("throw", (Cancelled("out"),))),
    st.just(("close", ())),
)


@pytest.mark.parametrize("kind", [Steps, Plain])
@given(acts=st.lists(ACTS, max_size=6))
def test_what_is_sent_or_thrown_reaches_the_steps_as_without_us(
    kind: Callable[[], Any], acts: list[tuple[str, Any]]
) -> None:
    acts = [("send", (None,)), *acts]
    bare = trace(within(kind()), acts)
    assert trace(within(_Sending(kind())), acts) == bare


def test_a_send_that_is_resumed_with_a_value_has_waited() -> None:
    sending = _Sending(Steps())
    steps = within(sending)
    steps.send(None)
    steps.send("what Trio hands back")
    assert sending.has_waited
    steps.send(2)
    with pytest.raises(StopIteration) as end:
        steps.send(3)
    assert end.value.value == ["what Trio hands back", 2, 3]
