"""The command `attach`: the screen over a live engine, a recording or a metrics page."""

__all__: list[str] = []
