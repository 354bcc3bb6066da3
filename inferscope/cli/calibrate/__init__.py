"""The command `calibrate`: rates and step times of this machine."""

__all__: list[str] = []
