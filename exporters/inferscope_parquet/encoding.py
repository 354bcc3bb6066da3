"""How columns stand in a file: compressed, and by dictionary where values come again.

Shares of a step and gaps between tokens hardly ever do: they stand as differences, which are small.
Request ids of slices do so only step after step, which compression finds by itself. With
dictionaries of these, files become half as large again and take longer to write
(`benchmarks/parquet_cost.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from inferscope_parquet.tables import SCHEMA_KEY, SCHEMA_VERSION

_DIFFERENCES = {"ns": "DELTA_BINARY_PACKED", "tbt_ns.list.element": "DELTA_BINARY_PACKED"}
"""By the path of a column's values in the file."""
_PLAIN_WITH = "ns"
"""Where this column is, each row's request id is that of a slice."""


def writer_of(stream: IO[bytes], schema: pa.Schema) -> pq.ParquetWriter:
    """Return what writes a table of one of the SCHEMAS into a file, with the schema's version."""
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
    """Yield the paths under which Parquet has the values of a column."""
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
