"""Running the command line as a user would, and what a demo leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """What a demo left."""

    folder: Path
    rings: Path
    snapshot: dict[str, Any]
    rows: list[dict[str, Any]]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the export's lines of one kind."""
        return [row for row in self.rows if row["kind"] == kind]


def inferscope(
    *arguments: str, rings: Path, timeout_s: float = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user would, with a ring folder of its own."""
    return subprocess.run(
        [sys.executable, "-m", "inferscope", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "INFERSCOPE_DIR": str(rings), **environment},
        check=False,
    )
