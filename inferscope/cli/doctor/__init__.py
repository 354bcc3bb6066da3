"""The command `doctor`: what this machine can do."""

__all__: list[str] = []
