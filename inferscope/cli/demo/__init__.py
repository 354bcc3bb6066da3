"""The command `demo`: an engine process under load, with the screen over it."""

__all__: list[str] = []
