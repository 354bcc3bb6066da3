"""Index of requests by name: the rings and recordings that hold a request, and its index in each.

This is the first of two passes. It decodes only names and ends, so that unrelated requests cost
little; a ring that does not contain the name as bytes is not parsed at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from inferscope import records
from inferscope.errors import UnreadableFile
from inferscope.records import (
    COLUMNS,
    FINISHES,
    Live,
    Record,
    RequestEvent,
    RingOpened,
    Tick,
    UnknownRecord,
    decode,
)
from inferscope.ring import EngineRings, Identity, Loss, RecordingReader, RingReader

_CODES = (RequestEvent.CODE, Live.CODE)

_READ_BYTES = 1 << 22

RingKey = tuple[str, int, int, int]
"""Role, rank, PID and process start: identity of a ring, independent of its file."""


@dataclass
class RequestRef:
    """Lifecycle of one request according to its named records, from first record to end.

    Attributes:
        engine_id: engine of the request.
        request_id: the engine's own ID; with the engine's it is nearly a key (IDs recur).
        external_id: the client's ID; None if the client gave none.
        first_ns: monotonic time of its first record.
        real_offset_ns: wall clock minus monotonic clock at that time.
        finish: finish reason; empty while it is in flight.
        queued_ns: enqueue time; None if not observed; `admitted_ns` likewise.
        held: times of preemption and of resumption (None: not yet), and the reason.
        indices: request index in each ring.
    """

    engine_id: str
    request_id: str
    first_ns: int
    real_offset_ns: int
    external_id: str | None = None
    finish: str = ""
    queued_ns: int | None = None
    admitted_ns: int | None = None
    held: list[tuple[int, int | None, str]] = field(default_factory=list)
    indices: dict[RingKey, int] = field(default_factory=dict)

    def note(self, event: RequestEvent) -> None:
        """Apply one of its events, in order; applying one twice changes nothing."""
        self.external_id = self.external_id or event.external_id
        match event.kind:
            case records.TOKENISED | records.QUEUED:  # the core accepts it between two steps
                since_ns = event.at_ns if self.queued_ns is None else self.queued_ns
                self.queued_ns = min(since_ns, event.at_ns)
            case records.ADMITTED:
                self.admitted_ns = event.at_ns
            case records.PREEMPTED if not any(at_ns == event.at_ns for at_ns, *_ in self.held):
                self.held.append((event.at_ns, None, event.reason))
            case records.RESUMED if self.held and event.at_ns >= self.held[-1][0]:
                since_ns, _, reason = self.held[-1]
                self.held[-1] = (since_ns, event.at_ns, reason)
            case records.FINISHED:
                self.finish = event.reason if event.reason in FINISHES else "error"

    @property
    def names(self) -> tuple[str, ...]:
        """What it may be called."""
        return (self.request_id,) if self.external_id is None else (
            self.request_id, self.external_id,
        )  # fmt: skip

    @property
    def first_real_ns(self) -> int:
        """Return the wall time of its first record."""
        return self.first_ns + self.real_offset_ns


def matching(refs: Iterable[RequestRef], name: str) -> list[RequestRef]:
    """Return the requests with a name, newest first; full matches go before prefixes."""
    refs = sorted(refs, key=lambda ref: -ref.first_real_ns)
    whole = [ref for ref in refs if name in ref.names]
    return whole or [ref for ref in refs if any(n.startswith(name) for n in ref.names)]


class RequestIndex:
    """Index built from the records that name requests."""

    def __init__(self) -> None:
        self._lives: dict[tuple[str, str], list[RequestRef]] = {}
        self._by_index: dict[tuple[str, RingKey, int], RequestRef] = {}

    def refs(self) -> Iterator[RequestRef]:
        """Return all named requests."""
        for same in self._lives.values():
            yield from same

    def take(self, engine_id: str, ring: RingKey, record: Record, real_offset_ns: int) -> None:
        """Add one record of a ring."""
        if isinstance(record, RequestEvent):
            ref = self._by_index.get((engine_id, ring, record.index))
            if ref is None and record.request_id:
                ref = self._bind(
                    engine_id, ring, record.index, record.request_id, record.at_ns, real_offset_ns
                )
            if ref is not None:
                ref.note(record)
        elif isinstance(record, Live):
            try:
                indices = np.frombuffer(record.requests, dtype=COLUMNS["requests"]).tolist()
                arrived = np.frombuffer(record.arrived_ns, dtype=COLUMNS["arrived_ns"]).tolist()
                rows = list(zip(indices, arrived, record.request_ids, strict=True))
            except ValueError:
                return
            for index, at_ns, request_id in rows:
                if (engine_id, ring, index) not in self._by_index:
                    self._bind(engine_id, ring, index, request_id, at_ns, real_offset_ns)

    def _bind(
        self,
        engine_id: str,
        ring: RingKey,
        index: int,
        request_id: str,
        at_ns: int,
        real_offset_ns: int,
    ) -> RequestRef:
        same = self._lives.setdefault((engine_id, request_id), [])
        origin = ring[:2]
        if not same or any(known[:2] == origin for known in same[-1].indices):
            same.append(RequestRef(engine_id, request_id, at_ns, real_offset_ns))
        ref = same[-1]
        ref.first_ns = min(ref.first_ns, at_ns)
        ref.indices[ring] = index
        self._by_index[engine_id, ring, index] = ref
        return ref


def requests_in_rings(engines: Iterable[EngineRings], name: str) -> list[RequestRef]:
    """Return the requests of all engines whose rings contain the name as bytes."""
    registry = RequestIndex()
    for engine in engines:
        rings = [ring.path for ring in engine.rings]
        if any(_holds(path, name.encode()) for path in rings):
            # In time order, as in the fold: an ID may be used again.
            named = [item for path in rings for item in _named_in(path)]
            named.sort(key=lambda item: item[0].t_ns)
            for record, ring in named:
                offset_ns = ring.start_real_ns - ring.start_ns
                registry.take(engine.engine_id, key_of(ring), record, offset_ns)
    return list(registry.refs())


def requests_in_recording(path: Path) -> list[RequestRef]:
    """Return the requests that a recording names.

    Raises:
        UnreadableFile: the file is not a recording.
    """
    registry = RequestIndex()
    reader = RecordingReader(path)
    rings: dict[int, tuple[str, RingKey]] = {}
    offset_ns = 0
    try:
        for frame in reader.frames():
            if frame.code not in (*_CODES, Tick.CODE, RingOpened.CODE):
                continue
            try:
                record = decode(frame.code, frame.payload)
            except UnknownRecord:
                continue
            if isinstance(record, Tick):
                offset_ns = record.real_ns - record.t_ns
            elif isinstance(record, RingOpened):
                rings[record.ring] = (record.engine_id, key_of(record))
                offset_ns = offset_ns or record.start_real_ns - record.start_ns
            elif frame.ring in rings:
                registry.take(*rings[frame.ring], record, offset_ns)
    finally:
        reader.close()
    return list(registry.refs())


def key_of(ring: RingOpened | Identity) -> RingKey:
    """Return the identity of a ring."""
    return ring.role, ring.rank, ring.pid, ring.start_ns


def _named_in(path: Path) -> list[tuple[Record, Identity]]:
    """Return the records of a ring that name requests."""
    try:
        reader = RingReader(path)
    except UnreadableFile:
        return []
    named = []
    try:
        while frames := reader.read():
            for frame in frames:
                if isinstance(frame, Loss) or frame.code not in _CODES:
                    continue
                with suppress(UnknownRecord):
                    named.append((decode(frame.code, frame.payload), reader.identity))
    finally:
        reader.close()
    return named


def _holds(path: Path, needle: bytes) -> bool:
    """Return whether a file contains the bytes."""
    try:
        with path.open("rb") as file:
            before = b""
            while content := file.read(_READ_BYTES):
                if needle in before + content:
                    return True
                before = content[-len(needle) :]
    except OSError:
        pass
    return False
