"""How columns stand in a file: compressed, and by dictionary where values come again.

Of slices, shares of a step hardly ever do, and request ids only step after step, which compression
finds by itself: with dictionaries of them files of slices become a third larger, and take longer
(`benchmarks/parquet_cost.py`).
"""

from __future__ import annotations

from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from inferscope_parquet.tables import SCHEMA_KEY, SCHEMA_VERSION, SLICES

_SELDOM_AGAIN = ("request", "ns")


def writer_of(stream: IO[bytes], schema: pa.Schema) -> pq.ParquetWriter:
    """Return what writes a table of one of the SCHEMAS into a file, with the schema's version."""
    by_dictionary: bool | list[str] = True
    if schema.equals(SLICES):
        by_dictionary = [name for name in schema.names if name not in _SELDOM_AGAIN]
    told = schema.with_metadata({SCHEMA_KEY: str(SCHEMA_VERSION)})
    return pq.ParquetWriter(stream, told, compression="zstd", use_dictionary=by_dictionary)
