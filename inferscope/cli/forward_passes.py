"""Forward-pass metrics as the target of `attach` and `findings`: a file, or a ZMQ address."""

from __future__ import annotations

from pathlib import Path

from inferscope.insight.passes import ForwardPass, read_passes, receive_passes

_SCHEMES = ("ipc://", "tcp://")
_SUFFIXES = (".jsonl", ".jsonl.gz")
_LISTEN_S = 10.0
"""Time to receive messages from an address."""


def is_passes(target: str | None) -> bool:
    """Return whether a target is a file or an address of forward-pass metrics."""
    return target is not None and (target.startswith(_SCHEMES) or target.endswith(_SUFFIXES))


def passes_of(target: str, *, seconds: float = _LISTEN_S) -> tuple[ForwardPass, ...]:
    """Return the passes of a file, or those that an address publishes within some seconds.

    Raises:
        BadInput: the file is of another kind, or the address cannot be used.
        NotFound: nothing was published.
    """
    if target.startswith(_SCHEMES):
        return receive_passes(target, seconds)
    return read_passes(Path(target))
