"""JSON Lines: every final step and request, one object a line, for others to check against."""

from inferscope_jsonl.exporter import JsonlExporter

__all__ = ["JsonlExporter"]
