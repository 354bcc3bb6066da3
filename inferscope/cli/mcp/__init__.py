"""The command `mcp`: facts of engines and recordings for an assistant."""

__all__: list[str] = []
