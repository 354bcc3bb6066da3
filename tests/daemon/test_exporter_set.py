"""Exporters that hang or fail at their end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import ClassVar, cast

import pytest

from inferscope.daemon import exporter_set
from inferscope.errors import BadInput
from inferscope.fold.final_records import FinalRequest, FinalStep
from inferscope.fold.snapshots import Snapshot


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

    def on_step(self, step: FinalStep) -> None:
        pass

    def on_request(self, request: FinalRequest) -> None:
        pass

    def on_snapshot(self, snapshot: Snapshot) -> None:
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
    monkeypatch.setattr(exporter_set, "FLUSH_S", 0.2)
    lines = list[str]()
    one, other = Hanging({}), Hanging({})
    both = exporter_set.ExporterSet({"one": one, "other": other}, log_line=lines.append)
    both.open()
    other.may_end.set()
    for _ in range(3):
        both.on_snapshot(_NOTHING)
    assert (one.num_looks, other.num_looks) == (2, 2)
    began_s = time.monotonic()
    assert not both.close()
    assert time.monotonic() - began_s < 15  # it hangs for longer
    one.may_end.set()
    assert lines == [
        "one: hangs",
        "other: hangs",
        "exporter one disabled after error: OSError: the peer is gone",
        "exporter other disabled after error: OSError: the peer is gone",
        "exporter one did not close within 0.2 s",
    ]


def test_one_that_cannot_be_opened_closes_those_before_it() -> None:
    first, second = Hanging({}), Refusing({})
    first.may_end.set()
    both = exporter_set.ExporterSet({"first": first, "second": second}, log_line=lambda _: None)
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

    def on_request(self, request: FinalRequest) -> None:
        self.num_requests += 1


class Linking(Hanging):
    """Links to traces."""

    def link_traces(self, kept_trace: Callable[[FinalRequest], str | None]) -> None:
        self.kept_trace_of = kept_trace
        self.found = list[str | None]()
        self.dropped = list[Mapping[str, Mapping[str, int]]]()

    def on_request(self, request: FinalRequest) -> None:
        self.found.append(self.kept_trace_of(request))

    def on_snapshot(self, snapshot: Snapshot) -> None:
        self.dropped.append(snapshot.dropped)


@pytest.mark.parametrize("order", [("keeping", "linking"), ("linking", "keeping")])
def test_one_links_to_what_the_other_keeps_and_outlives_it(order: tuple[str, str]) -> None:
    keeping, linking = Keeping({}), Linking({})
    keeping.may_end.set()
    linking.may_end.set()
    by_name = {"keeping": keeping, "linking": linking}
    lines = list[str]()
    both = exporter_set.ExporterSet({name: by_name[name] for name in order}, log_line=lines.append)
    both.open()
    request = cast(FinalRequest, None)
    both.on_snapshot(_NOTHING)
    both.on_request(request)
    keeping.is_broken = True
    both.on_request(request)
    both.on_snapshot(_NOTHING)
    assert linking.found == ["a" * 32, None]
    assert linking.dropped == [{"keeping": {"queue_full": 3}}, {}]
    assert sum("disabled after error" in line for line in lines) == 1
    assert both.close()


def test_one_that_has_lost_count_is_switched_off_alone() -> None:
    keeping, linking = Keeping({}), Linking({})
    keeping.may_end.set()
    linking.may_end.set()
    both = exporter_set.ExporterSet(
        {"keeping": keeping, "linking": linking}, log_line=lambda _: None
    )
    keeping.is_broken = True
    both.on_snapshot(_NOTHING)
    assert linking.dropped == [{}]
    assert both.close()


class Replaceable(Keeping):
    """Goes on where another one ends."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        super().__init__(settings)
        self.settings = settings
        self.former: Replaceable | None = None
        self.may_end.set()

    def open(self) -> None:
        assert "bad" not in self.settings, "not open"

    def open_replacing(self, former: Replaceable) -> None:
        self.open()

    def take_over(self, former: Replaceable) -> None:
        self.former = former


def installed(monkeypatch: pytest.MonkeyPatch, **kinds: type[Hanging]) -> None:
    """Replace the installed exporters by these."""
    monkeypatch.setattr(exporter_set, "load_live_exporter", kinds.__getitem__)


def test_only_what_changed_is_replaced_and_nothing_that_was_given_up_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, same=Keeping, changed=Replaceable, gone=Hanging, new=Linking)
    sections: dict[str, Mapping[str, object]] = {"same": {}, "changed": {"a": 1}, "gone": {}}
    before = exporter_set.make_exporters(sections)
    for each in before.values():
        cast(Hanging, each).may_end.set()
    lines = list[str]()
    all_of_them = exporter_set.ExporterSet(before, sections=sections, log_line=lines.append)
    all_of_them.open()
    del lines[:]
    after: dict[str, Mapping[str, object]] = {"same": {}, "changed": {"a": 2}, "new": {}}
    all_of_them.change(after)
    assert lines == ["gone: closed", "changed: hangs", "new: hangs"]
    now = all_of_them._on
    assert list(now) == ["same", "changed", "new"]
    assert now["same"] is before["same"]
    changed, linking = cast(Replaceable, now["changed"]), cast(Linking, now["new"])
    linking.may_end.set()
    assert changed.former is before["changed"]
    assert linking.kept_trace_of(cast(FinalRequest, None)) == "a" * 32
    for _ in range(2):  # while the former one is closed, and then
        all_of_them.on_snapshot(_NOTHING)
        assert linking.dropped[-1]["changed"] == {"queue_full": 6}
        for one in all_of_them._replaced:
            one.join()
    assert all_of_them.close()


def test_a_change_that_cannot_be_made_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, one=Replaceable, other=Hanging, taken=Refusing)
    sections: dict[str, Mapping[str, object]] = {"one": {"a": 1}}
    lines = list[str]()
    exporters = exporter_set.ExporterSet(
        exporter_set.make_exporters(sections), sections=sections, log_line=lines.append
    )
    exporters.open()
    (one,) = exporters._on.values()
    with pytest.raises(BadInput, match="the address is taken"):
        exporters.change({"one": {"a": 2}, "taken": {}})
    with pytest.raises(BadInput, match="exporter one raised AssertionError: not open"):
        exporters.change({"one": {"bad": 1}})
    assert exporters._on == {"one": one}
    assert cast(Replaceable, one).former is None
    exporters.change(sections)
    assert exporters._on == {"one": one}
    assert exporters.close()
    assert lines == ["one: hangs"]


def test_one_that_was_switched_off_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, one=Hanging)
    sections: dict[str, Mapping[str, object]] = {"one": {}}
    broken = Hanging({})
    broken.may_end.set()
    exporters = exporter_set.ExporterSet(
        {"one": broken}, sections=sections, log_line=lambda _: None
    )
    exporters.open()
    for _ in range(2):
        exporters.on_snapshot(_NOTHING)
    assert exporters._on == {}
    exporters.change(sections)
    (one,) = exporters._on.values()
    cast(Hanging, one).may_end.set()
    assert one is not broken
    assert exporters.close()
