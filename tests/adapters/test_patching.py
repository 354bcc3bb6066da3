"""What an adapter replaces it gives back, and no fault of its hooks reaches the engine."""

from __future__ import annotations

import functools
import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from inferscope.adapters.patching import Around, Direct, Patches
from inferscope.probe import Probe
from inferscope.records import ProbeHealth
from tests.probe.fakes import FakeClock, make_probe, of


class Engine:
    def step(self, number: int, *, factor: int = 1) -> int:
        if number < 0:
            raise ValueError("negative")
        return number * factor


class Faster(Engine):
    pass


@pytest.fixture
def patches() -> Patches:
    return Patches("toy")


def test_hooks_see_the_call_and_its_result_and_change_neither(patches: Patches) -> None:
    seen: list[object] = []
    with_restore = patches.around(
        Engine,
        "step",
        before=lambda engine, number, **kw: seen.append(number) or "noted",
        after=lambda noted, result, engine, number, **kw: seen.append((noted, result, number, kw)),
    )
    try:
        assert with_restore
        assert Engine().step(3, factor=2) == 6
        assert seen == [3, ("noted", 6, 3, {"factor": 2})]
    finally:
        patches.restore()
    assert Engine().step(3) == 3
    assert len(seen) == 2


@pytest.mark.parametrize("owner", [Engine, Faster])
def test_restoring_leaves_a_class_as_it_was(patches: Patches, owner: type[Engine]) -> None:
    before = dict(vars(owner))
    patches.around(owner, "step", after=lambda *args, **kw: None)
    assert dict(vars(owner)) != before
    patches.restore()
    assert dict(vars(owner)) == before


def test_a_foreign_wrapper_around_ours_stays_and_passes_calls_on(patches: Patches) -> None:
    original = vars(Engine)["step"]
    seen: list[object] = []
    patches.around(Engine, "step", after=lambda *args, **kw: seen.append(1))
    ours = vars(Engine)["step"]
    try:
        Engine.step = lambda self, number: ours(self, number) + 100  # type: ignore[method-assign]
        patches.restore()
        assert Engine().step(1) == 101
        assert not seen
    finally:
        Engine.step = original  # type: ignore[method-assign]


def test_hooks_are_put_around_what_another_tool_has_wrapped_over_hooks_that_are_off(
    patches: Patches,
) -> None:
    original = vars(Engine)["step"]
    seen: list[str] = []
    patches.around(Engine, "step", after=lambda *args, **kw: seen.append("first"))
    ours = vars(Engine)["step"]

    @functools.wraps(ours)
    def theirs(self: Engine, number: int) -> int:
        return int(ours(self, number))

    second = Patches("second")
    try:
        Engine.step = theirs  # type: ignore[method-assign, assignment]
        assert second.around(Engine, "step", after=lambda *args, **kw: seen.append("second"))
        Engine().step(1)
        assert seen == ["first"], "hooks are in place beneath"
        patches.restore()
        assert second.around(Engine, "step", after=lambda *args, **kw: seen.append("second"))
        Engine().step(1)
        assert seen == ["first", "second"]
        second.restore()
        assert vars(Engine)["step"] is theirs
    finally:
        Engine.step = original  # type: ignore[method-assign]


class Careful(Engine):
    def step(self, number: int, *, factor: int = 1) -> int:
        return super().step(abs(number), factor=factor) + 1


class Own(Engine):
    def step(self, number: int, *, factor: int = 1) -> int:
        if number == 0:
            raise ValueError("nothing")
        return 7


def test_hooks_around_an_override_are_called_once_whether_or_not_it_calls_its_base(
    patches: Patches,
) -> None:
    seen: list[object] = []
    kinds = (Engine, Careful, Own)
    before = [dict(vars(kind)) for kind in kinds]
    for kind in kinds:
        patches.around(
            kind,
            "step",
            before=lambda engine, number: number,
            after=lambda noted, result, engine, number: seen.append((noted, result)),
        )
    try:
        assert (Careful().step(-3), Own().step(1), Engine().step(5)) == (4, 7, 5)
        assert seen == [(-3, 4), (1, 7), (5, 5)]
        own = Own()
        with pytest.raises(ValueError, match="nothing"):
            own.step(0)
        own.step(2)
        assert seen[3:] == [(2, 7)], "an exception leaves nothing suspended"
    finally:
        patches.restore()
    assert [dict(vars(kind)) for kind in kinds] == before


def direct(patches: Patches, hook: Callable[[int], None]) -> Direct:
    """Return a wrapper of `step` that calls a hook with the result, written out in full."""

    def make(call: Callable[..., int], original: Callable[..., int]) -> Callable[..., int]:
        def step(engine: Engine, number: int, *, factor: int = 1) -> int:
            if patches.is_off or (patches.within and patches.is_within("step", engine)):
                return original(engine, number, factor=factor)
            result = call(engine, number, factor=factor)
            try:
                hook(result)
            except Exception as error:
                patches.caught(hook, error)
            return result

        return step

    return Direct(make)


def test_a_direct_wrapper_runs_its_hook_once_for_an_override_and_its_base(
    patches: Patches,
) -> None:
    seen: list[int] = []
    kinds = (Engine, Careful, Own)
    before = [dict(vars(kind)) for kind in kinds]
    for kind in kinds:
        assert patches.unit("a step", kind, {"step": direct(patches, seen.append)})
    try:
        assert (Careful().step(-3), Own().step(1), Engine().step(5, factor=2)) == (4, 7, 10)
        assert seen == [4, 7, 10]
        assert Engine.step.__name__ == "step"
        assert not patches.within
    finally:
        patches.restore()
    assert [dict(vars(kind)) for kind in kinds] == before


def test_a_fault_in_a_direct_wrapper_switches_all_off_and_the_engine_goes_on(
    patches: Patches, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def broken(result: int) -> None:
        calls.append(result)
        raise RuntimeError("our own mistake")

    assert patches.unit("a step", Engine, {"step": direct(patches, broken)})
    with caplog.at_level(logging.WARNING):
        assert [Engine().step(n) for n in (1, 2, 3)] == [1, 2, 3]
    with pytest.raises(ValueError, match="negative"):
        Engine().step(-1)
    patches.restore()
    assert (calls, patches.is_off) == ([1], True)
    assert caplog.text.count("our own mistake") == 1


class Slow(Engine):
    entered, released = threading.Event(), threading.Event()

    def step(self, number: int, *, factor: int = 1) -> int:
        if number == 0:
            self.entered.set()
            assert self.released.wait(20)
        return super().step(number, factor=factor)


def test_hooks_see_the_calls_of_a_thread_while_another_is_within_an_override(
    patches: Patches,
) -> None:
    seen: list[object] = []
    for kind in (Engine, Slow):
        patches.around(kind, "step", before=lambda engine, number: seen.append(number))
    engine = Slow()
    other = threading.Thread(target=engine.step, args=(0,))
    other.start()
    try:
        assert engine.entered.wait(20)
        engine.step(1)
    finally:
        engine.released.set()
        other.join()
        patches.restore()
    assert seen == [0, 1]


def test_patching_twice_is_patching_once(patches: Patches) -> None:
    seen: list[object] = []
    for _ in range(2):
        assert patches.around(Engine, "step", after=lambda *args, **kw: seen.append(1))
    assert Patches("again").around(Faster, "step", after=lambda *args, **kw: seen.append(1))
    Faster().step(1)
    patches.restore()
    assert seen == [1]


@pytest.mark.parametrize("which", ["before", "after"])
def test_a_fault_in_a_hook_is_reported_once_and_switches_all_off(
    patches: Patches, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[object] = []

    def broken(*args: object, **kwargs: object) -> None:
        calls.append(1)
        raise RuntimeError("our own mistake")

    if which == "before":
        patches.around(Engine, "step", before=broken)
    else:
        patches.around(Engine, "step", after=broken)
    with caplog.at_level(logging.WARNING):
        assert [Engine().step(n) for n in (1, 2, 3)] == [1, 2, 3]
    patches.restore()
    assert len(calls) == 1
    assert patches.is_off
    assert caplog.text.count("our own mistake") == 1


@pytest.mark.parametrize("which", ["before", "after", "direct"])
def test_an_exception_of_the_hosts_signal_handler_reaches_the_host(
    patches: Patches, which: str
) -> None:
    class TimeIsUp(Exception):
        """A limit of the host's own."""

    def alarmed(number: int, frame: object) -> None:
        raise TimeIsUp

    def interrupted(*args: object, **kwargs: object) -> None:
        signal.raise_signal(signal.SIGALRM)

    hook = direct(patches, interrupted) if which == "direct" else Around(**{which: interrupted})
    patches.unit("a step", Engine, {"step": hook})
    handler = signal.signal(signal.SIGALRM, alarmed)
    try:
        with pytest.raises(TimeIsUp):
            Engine().step(1)
    finally:
        signal.signal(signal.SIGALRM, handler)
        is_off = patches.is_off
        patches.restore()
    assert not is_off


def test_a_fault_without_a_text_switches_off_like_any_other(
    patches: Patches, caplog: pytest.LogCaptureFixture
) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    class Hook:
        def __call__(self, *args: object) -> None:
            raise Mute

        def __repr__(self) -> str:
            raise RuntimeError("no name")

    patches.around(Engine, "step", before=Hook())
    with caplog.at_level(logging.WARNING):
        assert Engine().step(1) == 1
    assert patches.is_off
    patches.restore()
    assert "Mute" in caplog.text


def test_a_fault_switches_the_probes_off(patches: Patches, tmp_path: object) -> None:
    probe = Probe.disabled()
    patches.probes.append(probe)
    patches.run(lambda: 1 // 0)
    assert patches.is_off
    assert not probe.on


def test_the_engines_own_exceptions_pass(patches: Patches) -> None:
    seen: list[object] = []
    patches.around(Engine, "step", after=lambda *args, **kw: seen.append(1))
    with pytest.raises(ValueError, match="negative"):
        Engine().step(-1)
    patches.restore()
    assert not seen


def test_a_missing_place_is_unsupported_and_reported_once(
    patches: Patches, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not patches.around(Engine, "stride", after=lambda *args: None)
            assert patches.find("inferscope", "nothing_of_that_name") is None
            assert patches.find("no_such_module", "Engine") is None
        assert not patches.around(patches.find("no_such_module", "Engine"), "step")
    assert caplog.text.count("unsupported") == 3
    assert "Engine.stride is missing" in caplog.text
    assert not patches.is_off


def test_functions_of_a_module_are_replaced_like_methods(patches: Patches) -> None:
    module = ModuleType("toy")
    module.double = lambda number: 2 * number  # type: ignore[attr-defined]
    original = module.double
    seen: list[object] = []
    patches.around(module, "double", after=lambda noted, result, number: seen.append(result))
    assert module.double(4) == 8
    patches.restore()
    assert module.double is original
    assert seen == [8]


def _closed(self: Engine, number: int) -> int:
    return number


def _renamed(self: Engine, count: int, *args: object, **kwargs: object) -> int:
    return count


def _named(self: Engine, number: int, *args: object, **kwargs: object) -> int:
    return number


def _open(*args: object, **kwargs: object) -> int:
    return 7


@pytest.mark.parametrize(
    ("wrapper", "why"),
    [
        (_closed, "takes factor too"),
        (_renamed, "does not take count in this order"),
        (_named, ""),
        (_open, ""),
    ],
)
def test_a_wrapper_that_would_refuse_a_call_of_the_engine_is_not_installed(
    patches: Patches, caplog: pytest.LogCaptureFixture, wrapper: Callable[..., int], why: str
) -> None:
    with caplog.at_level(logging.WARNING):
        is_installed = patches.replace(Engine, "step", lambda original: wrapper)
        is_whole = patches.unit("steps", Faster, {"step": Direct(lambda call, original: wrapper)})
    assert (is_installed, is_whole) == (not why, not why)
    assert why in caplog.text
    assert bool(why) == ("unsupported" in caplog.text)
    if why:
        assert Engine().step(number=3, factor=2) == 6
        assert "step" not in vars(Faster)


class Locked(type):
    """A class of which one attribute cannot be set, as none can of a compiled one."""

    def __setattr__(cls, name: str, value: object) -> None:
        if name == "close":
            raise TypeError("cannot set 'close'")
        super().__setattr__(name, value)


class Resource(metaclass=Locked):
    def open(self) -> str:
        return "open"

    def close(self) -> str:
        return "closed"


def test_a_unit_is_in_place_whole_or_not_at_all(
    patches: Patches, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []
    hooks = {
        "open": Around(after=lambda *_: seen.append("open")),
        "close": Around(before=lambda *_: seen.append("close")),
    }
    before = dict(vars(Resource))
    assert not patches.unit("locked", Resource, hooks)
    assert not patches.unit("absent", None, hooks)
    assert not patches.unit("partial", Engine, {"step": Around(), "stop": Around()})
    assert dict(vars(Resource)) == before
    assert Resource().open() == "open"
    assert not seen
    lines = [line.partition("unsupported: ")[2] for line in caplog.messages]
    assert lines == [
        f"locked: {__name__}.Resource cannot be wrapped: cannot set 'close' (toy)",
        "absent: its class is missing (toy)",
        f"partial: {__name__}.Engine.stop is missing (toy)",
    ]
    free = type("Free", (), {"open": Resource.open, "close": Resource.close})
    assert patches.unit("free", free, hooks)
    assert (free().open(), free().close()) == ("open", "closed")
    assert seen == ["open", "close"]
    patches.restore()


def test_what_is_unsupported_is_in_rings_that_come_before_and_after(
    patches: Patches, tmp_path: Path
) -> None:
    probes = [make_probe(tmp_path, FakeClock(step_ns=1), name=name) for name in ("a", "b", "c")]
    patches.attach(probes[0])
    patches.unsupported("pauses: gone")
    patches.unsupported("pauses: gone")
    patches.attach(probes[1])
    patches.attach(probes[2], is_observing=False)
    assert [probe.on for probe in probes] == [True, True, False]
    for probe in probes:
        path = probe.path
        assert path is not None
        probe.close()
        assert of(ProbeHealth, path)[-1].unsupported == ("pauses: gone",)
