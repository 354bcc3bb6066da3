"""Command line: one module or folder per command; its docstring is the help text."""

__all__: list[str] = []
