"""Dots within cells: two across and four down, by braille characters."""

from __future__ import annotations

_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_EMPTY = 0x2800


class Dots:
    """Grid of dots over cells, drawn from the top left.

    Attributes:
        width: dots across.
        height: dots down.
    """

    def __init__(self, columns: int, rows: int) -> None:
        """Start empty, for this number of cells."""
        self.width, self.height = columns * 2, rows * 4
        self._cells = [[0] * columns for _ in range(rows)]

    def set(self, x: int, y: int) -> None:
        """Set a dot; one outside of the grid is left out."""
        if 0 <= x < self.width and 0 <= y < self.height:
            self._cells[y // 4][x // 2] |= _BITS[y % 4][x % 2]

    def rows(self) -> list[str]:
        """Return the cells, blank where no dot is set."""
        return [
            "".join(chr(_EMPTY + bits) if bits else " " for bits in cells) for cells in self._cells
        ]
