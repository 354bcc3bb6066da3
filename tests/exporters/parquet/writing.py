"""A writer that goes on until it is killed: run with a folder, speaks in the middle of a file."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from inferscope_parquet import FolderExport

from tests.exporters.finals import look, step

exporter = FolderExport(Path(sys.argv[1]))
exporter.on_snapshot(look(0))
for number in itertools.count():
    exporter.on_step(step(number, number, num_slices=4000))
    exporter.on_snapshot(look(number))
    if number % 300 == 150:  # half of a file's life
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
