"""Origin of the records that a report shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """Where the records came from."""

    name: str
    """Recording, folder or engine."""
    is_live: bool
    """Whether the engine still runs: the report then ends at the newest record."""
    notes: tuple[str, ...] = ()
    """Warnings about the records: damage, lost records, a newer format."""
    is_refit: bool = False
    """Whether the final cost models priced all steps."""
