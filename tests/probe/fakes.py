"""A clock that stands still until advanced, a ring in a folder, and a way to read one back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from inferscope.probe import EngineInfo, Probe
from inferscope.readers.expansion import Expansion
from inferscope.records import PREFILL, Record, StepSlices, StepSpan, UnknownRecord, decode
from inferscope.ring.control import open_control
from inferscope.ring.layout import MIN_CAPACITY, Identity
from inferscope.ring.reader import Frame, Loss, RingReader
from inferscope.ring.writer import RingWriter

Kind = TypeVar("Kind", bound=Record)

ME = Identity("engine", "core", 0, 1, "host", "boot", 1, 2)


class FakeClock:
    """Both clocks, moved by hand; each reading may cost something."""

    def __init__(self, now_ns: int = 1_000_000_000, *, step_ns: int = 0) -> None:
        self.now_ns = now_ns
        self.step_ns = step_ns

    def monotonic_ns(self) -> int:
        self.now_ns += self.step_ns
        return self.now_ns

    def real_ns(self) -> int:
        return self.now_ns + 5


def make_ring(folder: Path, name: str = "a", capacity: int = MIN_CAPACITY) -> RingWriter:
    return RingWriter(folder / f"{name}.ring", ME, capacity=capacity)


def make_probe(
    folder: Path,
    clock: FakeClock,
    *,
    name: str = "a",
    capacity: int = 1 << 20,
    has_switch: bool = False,
    **parts: object,
) -> Probe:
    ring = make_ring(folder, name, capacity)
    return Probe(
        ring,
        open_control(ring.path) if has_switch else None,
        EngineInfo(0, "test"),
        clock=clock,
        **parts,  # type: ignore[arg-type]
    )


def do_step(probe: Probe, step: int, requests: list[int]) -> None:
    ones = [1] * len(requests)
    probe.plan(step, start_ns=0, end_ns=1, waiting=0, running=len(requests))
    probe.start(step)
    probe.stop(step)
    probe.slices(step, requests=requests, phases=ones, tokens=ones, contexts=ones)
    probe.emitted(requests, ones, step=step)


def everything(reader: RingReader) -> list[Frame | Loss]:
    found: list[Frame | Loss] = []
    while some := reader.read():
        found += some
    return found


def records(path: Path) -> list[Record]:
    reader = RingReader(path)
    found = everything(reader)
    reader.close()
    known = []
    for frame in found:
        assert isinstance(frame, Frame), frame
        try:
            known.append(decode(frame.code, frame.payload))
        except UnknownRecord:
            continue
    return known


def of(kind: type[Kind], path: Path) -> list[Kind]:
    return [record for record in records(path) if isinstance(record, kind)]


def check_device_spans(spans: Sequence[StepSpan]) -> None:
    """Assert that each step has a device span, no longer than its host span but for 1 ms."""
    assert spans
    for span in spans:
        assert span.device_start_ns is not None
        assert span.device_end_ns is not None
        device_ns = span.device_end_ns - span.device_start_ns
        assert 0 < device_ns < span.ready_ns - span.launch_start_ns + 1_000_000


def facts_of(kind: type[Kind], path: Path) -> list[Kind]:
    """Return the records of one kind as the fold takes them: a StepSame as what it stands for."""
    reader, expansion = RingReader(path), Expansion()
    found = []
    for frame in everything(reader):
        assert isinstance(frame, Frame), frame
        with suppress(UnknownRecord):
            record = decode(frame.code, frame.payload)
            facts = expansion.of(1, frame.sequence, record)
            found += [fact for fact in facts if isinstance(fact, kind)]
    reader.close()
    return found


def tokens_of_slices(path: Path) -> dict[int, tuple[int, int]]:
    """Return of each step how many tokens its slices have in prefills, and how many else."""
    found = {}
    for slices in facts_of(StepSlices, path):
        tokens = memoryview(slices.tokens).cast("I").tolist()
        prefill = sum(
            num for num, phase in zip(tokens, slices.phases, strict=True) if phase == PREFILL
        )
        found[slices.step] = (prefill, sum(tokens) - prefill)
    return found


def tokens_signed(path: Path) -> dict[int, tuple[int | None, int]]:
    """Return the same as the spans of a rank have it whose slices another process tells."""
    return {span.step: (span.prefill_tokens, span.decode_tokens) for span in of(StepSpan, path)}
