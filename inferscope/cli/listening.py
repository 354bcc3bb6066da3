"""Addresses on which a process listens, read from /proc, in the form that curl accepts."""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

from inferscope.ring import RingFile

_PROC = Path("/proc")
_LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp."""
_ANY = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}


def listening_addresses(ring: RingFile) -> list[str]:
    """Return host and port of each TCP socket on which the writer of a ring listens.

    The list is empty if the kernel denies this user access, if the pid belongs to another process
    (the ring was written in another pid namespace), and if the process is in another network
    namespace: its addresses are not reachable from here.
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
                continue  # closed or deleted meanwhile
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
    """Return the inode and address of each listening socket in a kernel table."""
    found = []
    for line in table.read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTEN:
            found.append((int(fields[9]), _address(fields[1])))
    return found


def _address(hexadecimal: str) -> str:
    """Return `0100007F:1F40` as 127.0.0.1:8000: the address is 32-bit words in host order."""
    host_hex, _, port = hexadecimal.partition(":")
    words = [int(host_hex[at : at + 8], 16) for at in range(0, len(host_hex), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    host = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
    host = _ANY.get(host, host.removeprefix("::ffff:"))
    return f"[{host}]:{int(port, 16)}" if ":" in host else f"{host}:{int(port, 16)}"
