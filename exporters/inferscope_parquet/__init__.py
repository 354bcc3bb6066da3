"""Parquet exporter: requests, steps and slices in columns, by the hour, for DuckDB and the like."""

from inferscope_parquet.exporter import FolderExport, ParquetExporter

__all__ = ["FolderExport", "ParquetExporter"]
