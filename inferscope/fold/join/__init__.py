"""Counter samples joined to the steps that ran meanwhile."""

__all__: list[str] = []
