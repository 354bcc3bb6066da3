"""Insertion of this host's calibration into the records of engines that lack it.

    … Keyframe, EngineInfo, [CostTable…], Live, Clock …      as if the engine had written it

An engine's probe writes the results of `inferscope calibrate` if it can read them. In a container,
as another user, or if it starts before the calibration, it cannot; its readers can. They add the
records to what they fold and record, so a replay needs no file and gives the same numbers. If the
ring has tables of its own, nothing is added.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from inferscope.readers.merge import Item
from inferscope.records import SAMPLER_ROLE, CostTable, EngineInfo, RingOpened, encode
from inferscope.ring import boot_id

TablesOf = Callable[[EngineInfo], Sequence[CostTable]]
_WITHOUT_DEVICE = ("frontend", SAMPLER_ROLE)
_DESCRIBING = frozenset((EngineInfo, RingOpened))
_record_of = operator.attrgetter("record")


class _Ring(NamedTuple):
    """Tables chosen once for a ring: those known when the reader first saw its engine."""

    info: EngineInfo
    tables: Sequence[CostTable]


class Calibrated:
    """Inserter of cost tables into the records of rings that have none."""

    def __init__(self, tables_of: TablesOf) -> None:
        """Use `tables_of` to find the tables of an engine's device."""
        self._tables_of = tables_of
        self._rings: dict[int, _Ring | None] = {}
        """Choice for each ring of this host's engines; None before its EngineInfo."""
        self._described: dict[int, Item] = {}
        """Rings whose newest record is an EngineInfo."""

    def with_tables(self, items: list[Item]) -> list[Item]:
        """Return the records with the missing tables, in fold order.

        Most batches contain no EngineInfo or RingOpened; that check takes 0.1 µs per record.
        """
        if not self._described and _DESCRIBING.isdisjoint(map(type, map(_record_of, items))):
            return items
        out: list[Item] = []
        for item in items:
            record, number = item.record, item.ring
            if type(record) is RingOpened:
                self._open(record)
            elif type(record) is EngineInfo:
                if number in self._rings:
                    self._described[number] = item
            elif self._described and number in self._described:
                described = self._described.pop(number)
                if type(record) is not CostTable:
                    out += self._missing(described, item.t_ns)
            out.append(item)
        return out

    def _open(self, opened: RingOpened) -> None:
        is_here = opened.boot_id == boot_id()
        if is_here and opened.role not in _WITHOUT_DEVICE:
            self._rings.setdefault(opened.ring, None)

    def _missing(self, described: Item, t_ns: int) -> list[Item]:
        """Return the tables that the ring lacks after its EngineInfo."""
        assert isinstance(described.record, EngineInfo)
        info = msgspec.structs.replace(described.record, t_ns=0)
        known = self._rings[described.ring]
        if known is None or known.info != info:
            known = self._rings[described.ring] = _Ring(info, self._tables_of(info))
        tables = [msgspec.structs.replace(table, t_ns=t_ns) for table in known.tables]
        # They repeat the preceding record's sequence number, so no frame of the ring seems lost.
        place = (t_ns, described.ring, described.sequence)
        return [Item(*place, table, encode(table)) for table in tables]
