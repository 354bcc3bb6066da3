"""File that a command writes at the path of `--out`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from inferscope.errors import BadInput
from inferscope.private import private_file


@contextlib.contextmanager
def output_file(target: Path | None, *, force: bool) -> Iterator[IO[bytes]]:
    """Open a file private to its owner, which replaces `target` once it is complete.

    A failure replaces nothing. An existing target that is not a regular file (a pipe, a device) is
    written to directly.

    Args:
        target: path to write; None for standard output.
        force: whether to replace an existing file.

    Raises:
        BadInput: the file exists, or it cannot be written.
    """
    has_place = target is None or (target.exists() and not target.is_file())
    if not has_place and target is not None and target.exists() and not force:
        raise BadInput(f"--out {target} exists. Overwrite it with --force, or choose another path.")
    part: Path | None = None
    if target is not None and not has_place:
        part = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        if target is None:
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        else:
            with private_file(part or target) as out:
                yield out
                out.flush()
        if part is not None and target is not None:
            part.replace(target)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        where = "standard output" if target is None else target
        raise BadInput(f"cannot write {where}: {error.strerror}. Choose another path.") from error
    finally:
        if part is not None:
            with contextlib.suppress(OSError):
                part.unlink()
