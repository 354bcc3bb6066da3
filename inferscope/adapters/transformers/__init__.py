"""The adapter for transformers: `generate`, continuous batching and its server."""

__all__: list[str] = []
