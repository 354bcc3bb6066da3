"""Encoding of columns: compressed, and with dictionaries for repeated values.

Shares of a step and gaps between tokens rarely repeat: they are delta-encoded. Request IDs of
slices repeat only from step to step, which compression finds by itself. With dictionaries of these,
files grow by half and take longer to write (`benchmarks/parquet_cost.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from inferscope_parquet.tables import SCHEMA_KEY, SCHEMA_VERSION

_DIFFERENCES = {"ns": "DELTA_BINARY_PACKED", "tbt_ns.list.element": "DELTA_BINARY_PACKED"}
"""Encodings by the path of a column's values in the file."""
_PLAIN_WITH = "ns"
"""Column that marks the slices table, whose request IDs are written plain."""


def writer_of(stream: IO[bytes], schema: pa.Schema) -> pq.ParquetWriter:
    """Return a Parquet writer for one of the SCHEMAS, with the schema's version."""
    paths = [path for field in schema for path in _paths(field)]
    plain = {"request"} if _PLAIN_WITH in schema.names else set()
    return pq.ParquetWriter(
        stream,
        schema.with_metadata({SCHEMA_KEY: str(SCHEMA_VERSION)}),
        compression="zstd",
        use_dictionary=[path for path in paths if path not in _DIFFERENCES and path not in plain],
        column_encoding={path: _DIFFERENCES[path] for path in paths if path in _DIFFERENCES},
    )


def _paths(field: pa.Field, before: str = "") -> Iterator[str]:
    """Yield the Parquet paths of a column's values."""
    path, kind = before + field.name, field.type
    if pa.types.is_map(kind):
        for each in (kind.key_field, kind.item_field):
            yield from _paths(each, f"{path}.key_value.")
    elif pa.types.is_list(kind):
        yield from _paths(kind.value_field.with_name("element"), f"{path}.list.")
    elif pa.types.is_struct(kind):
        for at in range(kind.num_fields):
            yield from _paths(kind.field(at), f"{path}.")
    else:
        yield path
