"""The command `slo`: objectives explained, evaluated and written as rules."""

__all__: list[str] = []
