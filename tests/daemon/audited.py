"""Run a module as Python would, and note each connection, bind, program and file it writes to.

python audited.py FILE MODULE ARGUMENTS…

Python tells of them before they happen, whatever library asks for them.
"""

from __future__ import annotations

import os
import runpy
import sys

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_EVENTS = (
    "socket.bind",
    "socket.connect",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.sendmsg",
    "socket.sendto",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
)


def main() -> None:
    """Run it."""
    _, file, module, *arguments = sys.argv
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(event: str, event_arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, _, flags = event_arguments
            if not isinstance(path, int) and isinstance(flags, int) and flags & _WRITES:
                os.write(log, f"write {os.fsdecode(path)}\n".encode())  # type: ignore[arg-type]
        elif event in _EVENTS:
            os.write(log, f"{event} {event_arguments!r}\n".encode())

    sys.addaudithook(note)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


main()
