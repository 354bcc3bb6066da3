"""Cost of Parquet: on the fold's thread, on the writer's, in a merge of files, and on disk.

Folds `samples/demo.isr` once and writes its requests, and steps of a full batch made of its last
one, over and over, into a temporary folder. Prints processor time and bytes.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from demo_finals import BATCH, demo_records, full_step
from inferscope_parquet.batches import BatchBuilder, RowBatch
from inferscope_parquet.compaction import compact
from inferscope_parquet.folder import Folder
from inferscope_parquet.settings import ParquetSettings
from msgspec.structs import replace

from inferscope.fold.final_records import FinalStep

STEPS = 2000
FILES = 12
"""Number of five-minute files in an hour."""


def varied_step(like: FinalStep, number: int) -> FinalStep:
    """Return a full batch's step whose values vary, as in real compression."""
    rng = np.random.default_rng(number)
    return replace(
        full_step(like, number),
        contexts=np.arange(number, number + BATCH) * 37 % 8192,
        shares_ns=rng.integers(200_000, 400_000, BATCH),
    )


def process_us(work: Callable[[], object]) -> float:
    """Return the processor time of a function."""
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1e6


def merge_all(settings: ParquetSettings) -> None:
    """Merge the files of all hours that are there."""
    for name in settings.tables:
        for hour in settings.folder.glob(f"{name}/date=*/hour=*"):
            compact(hour, name, settings)


def main() -> None:
    """Run the benchmark."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--repeats", type=int, default=9)
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()

    recorded = demo_records()
    steps = [varied_step(recorded.steps[-1], number) for number in range(STEPS)]
    taken, written = list[float](), {"steps": list[float](), "requests": list[float]()}
    merged = {"steps": list[float](), "requests": list[float]()}
    sizes = dict[str, float]()
    for _ in range(options.repeats):
        handed = list[RowBatch]()
        gatherer = BatchBuilder(handed.append, rotate_ns=1 << 62)
        taken.append(process_us(lambda g=gatherer: [g.on_step(step) for step in steps]) / STEPS)
        batches = {
            "steps": RowBatch(steps, offset_ns=0, ends_files=True),
            "requests": RowBatch(requests=recorded.requests, offset_ns=0, ends_files=True),
        }
        for name, batch in batches.items():
            num = len(batch.steps) or len(batch.requests)
            with tempfile.TemporaryDirectory() as place:
                settings = ParquetSettings(Path(place))
                folder = Folder(settings)
                written[name].append(process_us(lambda f=folder, b=batch: f.write(b)) / num)
                files = Path(place).rglob("*.parquet")
                sizes[name] = round(sum(file.stat().st_size for file in files) / num, 1)
                for _ in range(FILES - 1):
                    folder.write(batch)
                took_us = process_us(lambda s=settings: merge_all(s))
                merged[name].append(took_us / (FILES * num))
    middle = options.repeats // 2
    result = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "requests": len(recorded.requests),
        "fold_thread_us": {f"step_of_{BATCH}": round(sorted(taken)[middle], 2)},
        "writer_thread_us": {
            f"step_of_{BATCH}": round(sorted(written["steps"])[middle], 2),
            "request": round(sorted(written["requests"])[middle], 2),
        },
        "merging_us": {
            f"step_of_{BATCH}": round(sorted(merged["steps"])[middle], 2),
            "request": round(sorted(merged["requests"])[middle], 2),
        },
        "bytes": {f"step_of_{BATCH}": sizes["steps"], "request": sizes["requests"]},
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
