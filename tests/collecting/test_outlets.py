"""Exporters that hang or fail at their end."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import ClassVar

import pytest

from inferscope.collecting import outlets
from inferscope.collector.finals import FinalRequest, FinalStep
from inferscope.collector.snapshot import Snapshot
from inferscope.errors import BadInput


class Hanging:
    """Ends when it may."""

    is_live: ClassVar[bool] = True

    def __init__(self, settings: Mapping[str, object]) -> None:
        self.may_end = threading.Event()
        self.num_looks = 0

    def describe(self) -> str:
        return "hangs"

    def open(self) -> None:
        pass

    def step(self, step: FinalStep) -> None:
        pass

    def request(self, request: FinalRequest) -> None:
        pass

    def look(self, snapshot: Snapshot) -> None:
        self.num_looks += 1
        if self.num_looks > 1:
            raise OSError("the peer is gone")

    def close(self) -> None:
        self.may_end.wait(30)


class Refusing(Hanging):
    """Cannot be opened."""

    def open(self) -> None:
        raise BadInput("the address is taken")


_NOTHING = Snapshot(0, 0, "live", (), "")


def test_a_hanging_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlets, "FLUSH_S", 0.2)
    said = list[str]()
    one, other = Hanging({}), Hanging({})
    both = outlets.Outlets({"one": one, "other": other}, say=said.append)
    both.open()
    other.may_end.set()
    for _ in range(3):
        both.look(_NOTHING)
    assert (one.num_looks, other.num_looks) == (2, 2)
    began_s = time.monotonic()
    assert not both.close()
    assert time.monotonic() - began_s < 15  # it hangs for longer
    one.may_end.set()
    assert said == [
        "one: hangs",
        "other: hangs",
        "the exporter one is switched off, it raised OSError: the peer is gone",
        "the exporter other is switched off, it raised OSError: the peer is gone",
        "the exporter one was not through after 0.2 s",
    ]


def test_one_that_cannot_be_opened_closes_those_before_it() -> None:
    first, second = Hanging({}), Refusing({})
    first.may_end.set()
    both = outlets.Outlets({"first": first, "second": second}, say=lambda _: None)
    with pytest.raises(BadInput, match="taken"):
        both.open()
    assert both.close()
