"""Exceptions with messages for the user.

    InferScopeError            exit 1: something we own failed
    ├── BadInput               exit 2: a value on the command line or in a file cannot be used
    ├── NotFound               exit 1: nothing to attach to, unknown pid, no such request
    ├── UnreadableFile         exit 1: not a ring or recording, or one too damaged to open
    └── RingUnavailable        exit 1: a ring cannot be made (no space, no permission)

Every message states what failed, the value, and what to do next. The command line prints it as one
line and exits with `exit_code`.
"""

from __future__ import annotations


class InferScopeError(Exception):
    """Base of every error that InferScope raises on purpose."""

    exit_code = 1


class BadInput(InferScopeError):
    """An invalid value given by the user."""

    exit_code = 2


class NotFound(InferScopeError):
    """A missing object that the user named."""


class UnreadableFile(InferScopeError):
    """A file that is not a ring or recording, or is damaged beyond opening."""


class RingUnavailable(InferScopeError):
    """A ring file that cannot be created."""
