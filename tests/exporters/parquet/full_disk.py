"""Files that cannot grow: run with a folder, reports losses and continues when there is room."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from inferscope_parquet.batches import RowBatch
from inferscope_parquet.folder import Folder
from inferscope_parquet.settings import ParquetSettings

from tests.exporters.finals import SECOND_NS, T0_S, step

folder = Folder(ParquetSettings(Path(sys.argv[1])))


def write(first: int) -> None:
    """Write ten steps and end their files."""
    steps = [step(number, number, num_slices=5000) for number in range(first, first + 10)]
    folder.write(RowBatch(steps, offset_ns=T0_S * SECOND_NS, ends_files=True))


write(0)
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
try:
    write(10)
except OSError as error:
    sys.stdout.write(f"{error.strerror}\n{folder.num_lost}\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
write(20)
