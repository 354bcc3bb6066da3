"""JSON Lines exporter: every final step and request as one object a line, for verification."""

from inferscope_jsonl.exporter import JsonlExporter

__all__ = ["JsonlExporter"]
