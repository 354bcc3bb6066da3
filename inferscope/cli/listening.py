"""On which addresses a process listens, from /proc: what a user types into curl."""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

from inferscope.ring.discovery import RingFile

_PROC = Path("/proc")
_LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""
_ANY = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}


def listening_addresses(ring: RingFile) -> list[str]:
    """Return host and port of each TCP socket on which the writer of a ring listens.

    Empty where the kernel does not let this user look, where the pid is another process's (it was
    read in another pid namespace), and where the process has a network of its own: its addresses
    lead nowhere from here.
    """
    process = _PROC / str(ring.identity.pid)
    try:
        if os.readlink(process / "ns/net") != os.readlink(_PROC / "self/ns/net"):
            return []
        ring_file = ring.path.stat()
        sockets: set[int] = set()
        is_writer = False
        for each in (process / "fd").iterdir():
            try:
                status = each.stat()
            except OSError:
                continue  # closed since, or a file that is gone
            is_writer = is_writer or os.path.samestat(status, ring_file)
            if stat.S_ISSOCK(status.st_mode):
                sockets.add(status.st_ino)
        if not is_writer:
            return []
        tables = [(process / "net" / name) for name in ("tcp", "tcp6")]
        rows = [row for table in tables if table.exists() for row in _rows(table)]
    except OSError:
        return []
    return sorted({address for inode, address in rows if inode in sockets})


def _rows(table: Path) -> list[tuple[int, str]]:
    """Return inode and address of each listening socket of a table of the kernel."""
    found = []
    for line in table.read_text(encoding="ascii").splitlines()[1:]:
        words = line.split()
        if words[3] == _LISTEN:
            found.append((int(words[9]), _address(words[1])))
    return found


def _address(hexadecimal: str) -> str:
    """Write `0100007F:1F40` as 127.0.0.1:8000: the address is in host order, by 32 bits."""
    host_hex, _, port = hexadecimal.partition(":")
    words = [int(host_hex[at : at + 8], 16) for at in range(0, len(host_hex), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    host = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
    host = _ANY.get(host, host.removeprefix("::ffff:"))
    return f"[{host}]:{int(port, 16)}" if ":" in host else f"{host}:{int(port, 16)}"
