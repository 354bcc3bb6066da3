"""Facts in the rings of a vLLM, without times and numbers that differ from run to run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from inferscope.readers.expansion import Expansion
from inferscope.records import (
    EVENTS,
    Emitted,
    Record,
    RequestEvent,
    StepPlan,
    StepSlices,
    StepSpan,
    decode,
)
from inferscope.ring.reader import Frame, RingReader
from tests.adapters.toy_vllm import Options
from tests.probe.fakes import everything

LIVES = [(9, 7), (14, 5), (3, 9), (6, 6), (11, 4)]
SCENARIOS = {
    "one after the other": Options(lives=LIVES[:2]),
    "chunks": Options(budget=5, lives=LIVES),
    "asynchronous": Options(is_async=1, lives=LIVES),
    "three in flight": Options(is_async=2, lives=LIVES),
    "drafts": Options(num_drafts=2, lives=LIVES, seed=3),
    "drafts, asynchronous": Options(num_drafts=2, is_async=1, lives=LIVES, seed=4),
    "preemption": Options(num_blocks=7, lives=LIVES),
    "preemption, asynchronous": Options(num_blocks=7, is_async=1, lives=LIVES),
    "preemption, second runner": Options(num_blocks=7, is_v2=True, lives=LIVES),
    "drafts and preemption": Options(num_blocks=7, num_drafts=2, lives=LIVES, seed=5),
    "aborts": Options(abort_every=5, lives=LIVES),
    "aborts, asynchronous": Options(abort_every=4, is_async=1, lives=LIVES),
    "a pause": Options(pause_at=5, lives=LIVES),
    "a team": Options(num_blocks=40, lives=[(3, 24)] * 3),
    "a team, asynchronous": Options(num_blocks=40, is_async=1, lives=[(3, 12)] * 3),
}


def stated(path: Path) -> list[Record]:
    """Return a ring's records, with steps that repeat the last one in full."""
    reader, expansion = RingReader(path), Expansion()
    found: list[Record] = []
    for frame in everything(reader):
        assert isinstance(frame, Frame)
        found += expansion.of(1, frame.sequence, decode(frame.code, frame.payload))
    reader.close()
    return found


def facts(rings: Path) -> dict[str, list[str]]:
    """Return the facts of all rings, each in a line, and the order in which they happened.

    Requests are those of one core. Facts of one kind that follow each other are in no order: some
    are read from sets.
    """
    (core,) = (stated(path) for path in rings.glob("core-*.ring"))
    found: dict[str, list[str]] = {"core": [], "worker": [], "order": []}
    digest_by_step = {}
    order: list[tuple[int, str, str]] = []
    for record in core:
        if isinstance(record, StepSlices):
            digest_by_step[record.step] = record.digest
        line = _line(record)
        if line:
            found["core"].append(line)
        order += _placed(record)
    found["core"].sort(key=_by_kind_and_step)
    order.sort(key=lambda fact: fact[0])
    found["order"] = list(_runs((kind, what) for _, kind, what in order))
    for path in rings.glob("worker-*.ring"):
        for record in stated(path):
            if isinstance(record, StepSpan):
                is_known = record.step in digest_by_step
                is_of = is_known and record.digest == digest_by_step[record.step] != 0
                found["worker"].append(
                    f"span {record.step} {record.mode} {record.padded_tokens} {record.cold:d}"
                    f"{record.dummy:d} {is_of:d} {record.prefill_tokens}+{record.decode_tokens}"
                )
    return found


def without_phases(span: str) -> str:
    """Return a span's line with the sum of its prefill and decode tokens."""
    rest, _, tokens = span.rpartition(" ")
    return f"{rest} {sum(map(int, tokens.split('+')))}"


def _by_kind_and_step(line: str) -> tuple[str, int, str]:
    kind, number, rest = line.split(" ", 2)
    return kind, int(number), rest


def _line(record: Record) -> str:
    if isinstance(record, StepPlan):
        blocks = f"{record.blocks_used}/{record.blocks_cached}/{record.blocks_total}"
        held = f"{record.binding} {sorted(_u32(record.preempted))}"
        return f"plan {record.step} {record.waiting}w {record.running}r {blocks} {held}"
    if isinstance(record, StepSlices):
        rows = (
            _u32(record.requests),
            list(record.phases),
            _u32(record.tokens),
            _u32(record.contexts),
            list(record.flags),
            _u16(record.sampled),
            _u16(record.proposed),
            _u16(record.accepted),
        )
        cells = " ".join(",".join(map(str, each)) or "-" for each in rows)
        return f"slices {record.step} {cells}"
    if isinstance(record, Emitted):
        pairs = zip(_u32(record.requests), _u32(record.tokens), strict=True)
        return f"emitted {record.step} {','.join(f'{index}:{num}' for index, num in pairs)}"
    if isinstance(record, RequestEvent):
        return (
            f"event {record.index} {EVENTS[record.kind]} {record.request_id} "
            f"{record.prompt_tokens} {record.cached_tokens} {record.reason}"
        )
    return ""


def _placed(record: Record) -> Iterator[tuple[int, str, str]]:
    """Yield a fact with the time at which it happened."""
    if isinstance(record, StepPlan):
        yield record.start_ns, f"plan {record.step}", ""
    elif isinstance(record, Emitted):
        at_ns = record.t_ns if record.at_ns is None else record.at_ns
        yield at_ns, f"emitted {record.step}", ""
    elif isinstance(record, RequestEvent):
        yield record.at_ns, EVENTS[record.kind], str(record.index)


def _runs(order: Iterable[tuple[str, str]]) -> Iterator[str]:
    for kind, run in groupby(order, key=lambda fact: fact[0]):
        yield f"{kind} {','.join(sorted(what for _, what in run))}".strip()


def _u32(cells: bytes) -> list[int]:
    return memoryview(cells).cast("I").tolist()


def _u16(cells: bytes) -> list[Any]:
    return memoryview(cells).cast("H").tolist()
