"""What requests computed, in the order in which it was booked, until somebody sums it up.

Counters need it by request and tenth of a second. `Work` knows what each request has computed so
far, and to ask that of all of them ten times a second costs more than all else of the join. So as
long as somebody counts, it hands on what it books: teams as they are told, and prefills and steps
that are booked row by row. Nothing is copied: what was told does not change any more.

    team a, its sums │ prefill │ team a │ team b │ ...        summed up at once, for all tenths
    ◄──────── tenth 7 ────────────────►◄─ tenth 8 ─
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_TOTALLED = 3
"""Time, bytes read, bytes written."""


class PerSingle(NamedTuple):
    """What decodes of one token move, by a model's rates."""

    read: int
    read_per_context: int
    read_per_seen: int
    """Of contexts, as far as windows reach."""
    written: int


OfTeam = tuple[Ints, Ints, Ints, Ints, int, int, int, PerSingle]
"""Who decoded one token each in some steps; sums over these, [requests], of time, contexts, and
contexts as far as windows reach, empty where there are none; the number of steps; bytes of the
weights that each request read, and the first besides; and what else they move."""
OfPrefill = tuple[int, int, int, int, int, int]
"""Whose, its time, bytes read and written; and what of the last two a decode had been booked."""


class Place(NamedTuple):
    """How many entries there are of each kind."""

    teams: int = 0
    prefills: int = 0
    rows: int = 0

    def behind(self, other: Place) -> Place:
        """Return it as counted from there."""
        return Place(*map(sub, self, other))


class Journal:
    """What was booked since it was last summed up.

    Attributes:
        teams: that decode one token each; in their steps, prefills are booked as decodes first.
        prefills: what takes the place of these decodes.
        rows: slots, phases, and time and bytes of other steps, [rows] and [rows, NUM_TOTALLED].
    """

    def __init__(self) -> None:
        self.teams: list[OfTeam] = []
        self.prefills: list[OfPrefill] = []
        self.rows: list[tuple[Ints, Ints, Ints]] = []

    def place(self) -> Place:
        """Return where it ends now."""
        return Place(len(self.teams), len(self.prefills), len(self.rows))

    def clear(self) -> None:
        """Forget all of it."""
        self.teams.clear()
        self.prefills.clear()
        self.rows.clear()

    def sum_up(self, ends: Sequence[Place], num_slots: int) -> tuple[Ints, Floats]:
        """Return what was computed in some tenths, and forget it.

        Args:
            ends: of each of them, where they end; the first begins where the journal does.
            num_slots: that there are.

        Returns:
            the slots that somebody computed in, ascending; and [tenths, these, phases · 3], whole
            numbers.
        """
        of_teams, of_prefills, of_rows = map(_tenths, zip(*ends, strict=True))
        teams, prefills = self.teams[: len(of_teams)], self.prefills[: len(of_prefills)]
        rows = self.rows[: len(of_rows)]
        del self.teams[: len(teams)], self.prefills[: len(prefills)], self.rows[: len(rows)]
        num_tenths = len(ends)
        keys_of = range(0, 2 * num_tenths * num_slots, num_slots)
        of_decode = keys_of[num_tenths:]
        told, few = list[Ints](), list[tuple[int, int, int, int]]()
        if teams:
            told.append(_of_teams(teams, [of_decode[tenth] for tenth in of_teams], few))
        for tenth, (slot, took_ns, read, written, instead_read, instead_written) in zip(
            of_prefills, prefills, strict=True
        ):
            few.append((keys_of[tenth] + slot, took_ns, read, written))
            few.append((of_decode[tenth] + slot, -took_ns, -instead_read, -instead_written))
        if few:
            told.append(np.array(few).T)
        if rows:
            told.append(_of_rows(rows, of_rows, num_slots, num_tenths))
        if not told:
            return np.zeros(0, dtype=np.int64), np.zeros((num_tenths, 0, 2 * NUM_TOTALLED))
        keys, *columns = np.concatenate(told, axis=1)
        # Floats hold them exactly up to 2**53, in whatever order they are added up.
        sums = np.array([np.bincount(keys, column, len(keys_of) * num_slots) for column in columns])
        sums = sums.reshape(NUM_TOTALLED, 2, num_tenths, num_slots)
        (there,) = np.logical_or.reduce(sums, axis=(0, 1, 2)).nonzero()
        found = sums.take(there, axis=3).transpose(2, 3, 1, 0)
        return there, found.reshape(num_tenths, len(there), -1)


def _tenths(ends: Sequence[int]) -> list[int]:
    """Return for each entry of what tenth it is."""
    found: list[int] = []
    for at, end in enumerate(ends):
        found += [at] * (end - len(found))
    return found


def _of_teams(teams: list[OfTeam], keys: list[int], few: list[tuple[int, int, int, int]]) -> Ints:
    """Return what teams computed: [key, time, bytes read, bytes written], each by request.

    Args:
        teams: they.
        keys: of slot 0 for each.
        few: takes the like of single requests.
    """
    members, shares_ns, contexts = list[Ints](), list[Ints](), list[Ints]()
    of_each: list[tuple[int, int, int, int]] = []
    for key, (slots, took_ns, seen_by, seen, num, each, rest, per_single) in zip(
        keys, teams, strict=True
    ):
        read, per_context, per_seen, written = per_single
        if per_seen:
            seen_by, per_context = per_context * seen_by + per_seen * seen, 1
        members.append(slots)
        shares_ns.append(took_ns)
        contexts.append(seen_by)
        of_each.append((key, each + num * read, num * written, per_context))
        if rest:
            few.append((key + slots.item(0), 0, rest, 0))
    sums = np.concatenate(members + shares_ns + contexts).reshape(3, -1)
    lengths = list(map(len, members))
    bases, reads, writes, reads_per_context = np.array(of_each).T.repeat(lengths, axis=1)
    bases += sums[0]
    reads += sums[2] * reads_per_context
    return np.array((bases, sums[1], reads, writes))


def _of_rows(
    rows: list[tuple[Ints, Ints, Ints]], tenths: list[int], num_slots: int, num_tenths: int
) -> Ints:
    """Return the same of rows."""
    slots, phases, amounts = map(np.concatenate, zip(*rows, strict=True))
    tenth = np.repeat(tenths, [len(each) for each, _, _ in rows])
    return np.array(((phases * num_tenths + tenth) * num_slots + slots, *amounts.T))
