"""The command `load`: requests on a fixed schedule."""

__all__: list[str] = []
