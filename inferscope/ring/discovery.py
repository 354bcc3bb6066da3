"""Where rings are, whose they are, and which engines are alive.

    INFERSCOPE_DIR/<engine_id>/<role>-<rank>-<pid>.ring   (+ .control beside it)

Alive is decided by the heartbeat in the header, never by the pid: a reader in another pid
namespace sees other pids. Whether a ring may be removed is decided by its writer's lock as well: a
process that is stopped does not beat, and is not dead.
"""

from __future__ import annotations

import fcntl
import functools
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from inferscope.errors import RingUnavailable, UnreadableFile
from inferscope.records import SAMPLER_ROLE
from inferscope.ring.control import control_path
from inferscope.ring.layout import Identity
from inferscope.ring.reader import RingReader

ALIVE_NS = 5_000_000_000
"""A heartbeat older than this is a dead, stopped or hung process; probes beat every 100 ms."""
KEEP_DEAD_NS = 24 * 3600 * 1_000_000_000
KEEP_DEAD_BYTES = 1 << 30


class RingFile(msgspec.Struct, frozen=True):
    """One ring as found on disk."""

    path: Path
    identity: Identity
    heartbeat_ns: int
    num_bytes: int

    def is_alive(self, now_ns: int) -> bool:
        """Tell whether its process has said so lately, in this boot of the machine."""
        is_this_boot = self.identity.boot_id == boot_id()
        return is_this_boot and abs(now_ns - self.heartbeat_ns) < ALIVE_NS


class EngineRings(msgspec.Struct, frozen=True):
    """The rings of one engine, oldest first."""

    engine_id: str
    rings: tuple[RingFile, ...]

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that write them."""
        return tuple(sorted({ring.identity.pid for ring in self.rings}))

    def is_alive(self, now_ns: int) -> bool:
        """Tell whether any of its processes is alive."""
        return any(ring.is_alive(now_ns) for ring in self.rings)


def ring_directory() -> Path:
    """Return the folder that rings live in: INFERSCOPE_DIR, the runtime folder, or /tmp."""
    configured = os.environ.get("INFERSCOPE_DIR")
    if configured:
        return Path(configured)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "inferscope"
    return Path(f"/tmp/inferscope-{os.getuid()}")


def make_private(folder: Path, *, group_id: int | None = None) -> None:
    """Make the folder for its owner (and a group) alone, or check whose it is.

    A folder of root's is trusted: a container's shared volume is one. A folder or a link that
    somebody else made, in `/tmp` say, is not: he could take the rings away and put others there.

    Raises:
        RingUnavailable: it cannot be made, or belongs to somebody else.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        entry, status = folder.lstat(), folder.stat()
    except OSError as error:
        raise RingUnavailable(
            f"cannot make the folder {folder}: {error.strerror}. "
            "Set INFERSCOPE_DIR to a writable folder."
        ) from error
    for owner in (entry.st_uid, status.st_uid):
        if owner not in (os.geteuid(), 0):
            raise RingUnavailable(
                f"the folder {folder} belongs to uid {owner}, not to this process. "
                "Set INFERSCOPE_DIR to a folder of your own."
            )
    if group_id is None or status.st_uid != os.geteuid():
        return
    try:
        os.chown(folder, -1, group_id)
        folder.chmod(0o750)
    except OSError as error:
        raise RingUnavailable(
            f"cannot let group {group_id} read {folder}: {error.strerror}. "
            "Start the engine as a member of that group, or unset INFERSCOPE_GROUP."
        ) from error


@functools.cache
def boot_id() -> str:
    """Return the id of this boot of the machine, empty where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def find_rings(folder: Path | None = None) -> Iterator[RingFile]:
    """Yield every readable ring under the folder; files that are not rings are passed over."""
    for path in _rings_under(folder or ring_directory()):
        try:
            reader = RingReader(path)
        except UnreadableFile:
            continue
        try:
            yield RingFile(path, reader.identity, reader.heartbeat_ns(), path.stat().st_size)
        except OSError:
            continue
        finally:
            reader.close()


def _rings_under(folder: Path) -> list[Path]:
    try:
        return sorted(folder.glob("**/*.ring"))
    except OSError:  # a folder that went away, or may not be looked into
        return []


def sampler_rings(folder: Path | None = None) -> list[Path]:
    """Return the rings of what has sampled this host's devices, whichever engine they are for."""
    try:
        return sorted(((folder or ring_directory()) / SAMPLER_ROLE).glob("*.ring"))
    except OSError:
        return []


def find_engines(folder: Path | None = None) -> list[EngineRings]:
    """Group the rings under the folder by engine, the newest engine first."""
    by_engine: dict[str, list[RingFile]] = {}
    for ring in find_rings(folder):
        if ring.identity.role != SAMPLER_ROLE:
            by_engine.setdefault(ring.identity.engine_id, []).append(ring)
    engines = [
        EngineRings(engine_id, tuple(sorted(rings, key=lambda ring: ring.identity.start_ns)))
        for engine_id, rings in by_engine.items()
    ]
    return sorted(engines, key=lambda engine: -engine.rings[-1].identity.start_real_ns)


def remove_old_rings(folder: Path, now_ns: int | None = None) -> int:
    """Delete rings of dead processes beyond a day or a gibibyte; return how many.

    Only plain files of this user are touched, and none that a living process writes.
    """
    now_ns = time.monotonic_ns() if now_ns is None else now_ns
    dead: list[tuple[int, int, Path]] = []
    for ring in find_rings(folder):
        status = _own_file(ring.path)
        if status is not None and not ring.is_alive(now_ns):
            dead.append((time.time_ns() - status.st_mtime_ns, ring.num_bytes, ring.path))
    kept_bytes = removed = 0
    for age_ns, num_bytes, path in sorted(dead):
        if kept_bytes + num_bytes <= KEEP_DEAD_BYTES and age_ns <= KEEP_DEAD_NS:
            kept_bytes += num_bytes
        else:
            removed += _remove(path)
    for path in folder.glob("**/*.ring.partial"):  # of writers killed while they made their ring
        status = _own_file(path)
        if status is not None and time.time_ns() - status.st_mtime_ns > KEEP_DEAD_NS:
            removed += _remove(path)
    return removed


def _own_file(path: Path) -> os.stat_result | None:
    """Return what the path is, None where it is not a plain file of this user."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() else None


def _remove(path: Path) -> bool:
    """Delete a ring, its control file and its folder if that is empty; tell whether it is gone.

    Another process may be tidying up beside us: whatever is gone already is well.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        control_path(path).unlink(missing_ok=True)
        path.unlink()
        path.parent.rmdir()
    except OSError:  # its writer lives, somebody else removed it, or the folder is still in use
        return not os.path.lexists(path)
    finally:
        os.close(handle)
    return True
