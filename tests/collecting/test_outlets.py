"""Exporters that hang or fail at their end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import ClassVar, cast

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


class Keeping(Hanging):
    """Keeps traces and counts what it drops, until it does not."""

    is_broken = False
    num_requests = 0

    @property
    def num_dropped(self) -> dict[str, int]:
        if self.is_broken:
            raise RuntimeError("lost count")
        return {"queue_full": 3}

    def kept_trace(self, request: FinalRequest) -> str | None:
        if self.is_broken:
            raise RuntimeError("no trace")
        return "a" * 32

    def request(self, request: FinalRequest) -> None:
        self.num_requests += 1


class Linking(Hanging):
    """Links to traces."""

    def link_traces(self, kept_trace: Callable[[FinalRequest], str | None]) -> None:
        self.kept_trace_of = kept_trace
        self.found = list[str | None]()
        self.dropped = list[Mapping[str, Mapping[str, int]]]()

    def request(self, request: FinalRequest) -> None:
        self.found.append(self.kept_trace_of(request))

    def look(self, snapshot: Snapshot) -> None:
        self.dropped.append(snapshot.dropped)


@pytest.mark.parametrize("order", [("keeping", "linking"), ("linking", "keeping")])
def test_one_links_to_what_the_other_keeps_and_outlives_it(order: tuple[str, str]) -> None:
    keeping, linking = Keeping({}), Linking({})
    keeping.may_end.set()
    linking.may_end.set()
    by_name = {"keeping": keeping, "linking": linking}
    said = list[str]()
    both = outlets.Outlets({name: by_name[name] for name in order}, say=said.append)
    both.open()
    request = cast(FinalRequest, None)
    both.look(_NOTHING)
    both.request(request)
    keeping.is_broken = True
    both.request(request)
    both.look(_NOTHING)
    assert linking.found == ["a" * 32, None]
    assert linking.dropped == [{"keeping": {"queue_full": 3}}, {}]
    assert sum("switched off" in line for line in said) == 1
    assert both.close()


def test_one_that_has_lost_count_is_switched_off_alone() -> None:
    keeping, linking = Keeping({}), Linking({})
    keeping.may_end.set()
    linking.may_end.set()
    both = outlets.Outlets({"keeping": keeping, "linking": linking}, say=lambda _: None)
    keeping.is_broken = True
    both.look(_NOTHING)
    assert linking.dropped == [{}]
    assert both.close()
