"""Command line: one module per command; the module's docstring is the command's help text."""
