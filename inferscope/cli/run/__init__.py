"""The command `run`: a program with the probe switched on."""

__all__: list[str] = []
