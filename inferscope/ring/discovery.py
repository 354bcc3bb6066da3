"""Discovery of rings: their folders, their owners, and which engines are alive.

    INFERSCOPE_DIR/<engine_id>/<role>-<rank>-<pid>.ring   (+ .control next to it)

Without INFERSCOPE_DIR a probe writes to /tmp/inferscope-UID, which a user's services, cron jobs
and shells share and which survives logout. XDG_RUNTIME_DIR is set in some of them only and removed
at logout, so a probe uses it only if another user holds the name in /tmp. Readers search every
folder that a probe of the user may have written to.

The heartbeat in the header decides whether a process is alive, never the PID: a reader in another
PID namespace sees other PIDs. The cleanup of rings also checks the writer's lock: a stopped process
has no heartbeat but has not ended.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import re
import stat
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from inferscope.errors import RingUnavailable, UnreadableFile
from inferscope.records import SAMPLER_ROLE
from inferscope.ring.layout import Identity
from inferscope.ring.reader import RingReader
from inferscope.ring.skew import read_here, running_skew_ns

ALIVE_NS = 5_000_000_000
"""Age in nanoseconds above which a heartbeat marks a dead, stopped or hung process; probes beat
every 100 ms."""
KEEP_DEAD_NS = 24 * 3600 * 1_000_000_000
KEEP_DEAD_BYTES = 1 << 30
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of `flock` on a file system without locks, where the heartbeat alone decides."""
_TMP = Path("/tmp")
_MAX_NAME = 100
_COMPANIONS = (
    *(".control", ".profile", ".profile-error"),
    *(".trace.json", ".trace.partial", ".trace.partial.tmp"),
)
"""Suffixes of the files next to a ring: control byte, profile request and its results."""
_LEFTOVER = re.compile(r"(.+-\d+-\d+(?:\.\d+)?)(?:" + "|".join(map(re.escape, _COMPANIONS)) + ")")
"""Pattern of such a file's name; the first group is the ring's name without suffix."""


class RingFile(msgspec.Struct, frozen=True):
    """One ring file on disk."""

    path: Path
    owner: int
    identity: Identity
    heartbeat_ns: int
    num_bytes: int
    skew_ns: int = 0
    """Nanoseconds to add to the times of a process in another time namespace."""

    def is_alive(self, now_ns: int) -> bool:
        """Return whether its heartbeat is fresh and of this boot of the machine."""
        is_this_boot = self.identity.boot_id == boot_id()
        return is_this_boot and abs(now_ns - self.heartbeat_ns - self.skew_ns) < ALIVE_NS


class EngineRings(msgspec.Struct, frozen=True):
    """The rings of one engine, oldest first; all have the same owner."""

    engine_id: str
    rings: tuple[RingFile, ...]

    @property
    def pids(self) -> tuple[int, ...]:
        """Process IDs of the writers."""
        return tuple(sorted({ring.identity.pid for ring in self.rings}))

    def is_alive(self, now_ns: int) -> bool:
        """Return whether any of its processes is alive."""
        return any(ring.is_alive(now_ns) for ring in self.rings)


def file_name(given: str) -> str:
    """Return the name as a valid file name; every process maps it to the same one."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "-", given)[:_MAX_NAME].lstrip(".")
    if safe == given:
        return safe
    return f"{safe}-{zlib.crc32(given.encode('utf-8', 'surrogatepass')):08x}"


def ring_directory() -> Path:
    """Return the folder that a probe of this user writes to."""
    configured = os.environ.get("INFERSCOPE_DIR")
    if configured:
        return Path(configured).absolute()  # the host may change its working directory
    usual, runtime = _usual_directory(), _runtime_directory()
    return usual if runtime is None or _is_usable(usual) else runtime


def search_directories() -> tuple[Path, ...]:
    """Return the folders that a probe of this user may have written to, `ring_directory` first.

    Folders of other users are excluded because their content is not trusted. Root also reads the
    folders of services with a private /tmp.
    """
    found = [ring_directory()]
    if not os.environ.get("INFERSCOPE_DIR"):
        runtime = _runtime_directory()
        found += [_usual_directory(), *([] if runtime is None else [runtime])]
        found.append(Path(f"/run/user/{os.getuid()}/inferscope"))
        found = [*filter(_is_usable, found)]
        if os.geteuid() == 0:
            for private in sorted(_TMP.glob("systemd-private-*")):
                # Any user can create a folder of this name in /tmp; systemd's belong to root.
                if _is_roots(private) and _is_roots(private / "tmp"):
                    inside = sorted(private.glob("tmp/inferscope-*"))
                    found += [folder for folder in inside if not folder.is_symlink()]
    return tuple({_file_of(folder): folder for folder in reversed(found)}.values())[::-1]


def reading_from(folder: Path) -> tuple[Path, ...]:
    """Return the folders to read: all search folders if the given one is the default."""
    return search_directories() if folder.absolute() == ring_directory() else (folder,)


def names_of(folders: Iterable[Path]) -> str:
    """Return the folders as comma-separated text for a message."""
    return ", ".join(map(str, folders))


def _usual_directory() -> Path:
    return _TMP / f"inferscope-{os.getuid()}"


def _runtime_directory() -> Path | None:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "inferscope" if runtime and os.access(runtime, os.W_OK) else None


def _is_usable(folder: Path) -> bool:
    """Return whether a folder is missing, or a real folder of this user or root."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid in (os.geteuid(), 0)


def _is_roots(folder: Path) -> bool:
    """Return whether a path is a real folder that root owns."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == 0


def _file_of(folder: Path) -> object:
    """Return a key that is equal for two names of the same folder."""
    try:
        status = folder.stat()
    except OSError:
        return folder
    return status.st_dev, status.st_ino


def make_private(folder: Path, *, group_id: int | None = None) -> str:
    """Create a folder private to its owner (and a group), or verify and restrict an existing one.

    A folder of this user that is writable for everyone is closed to others, and a group-writable
    one loses that right. A folder with the sticky bit, or a volume of its own, is left as it is.

    Returns:
        A line for the log if an existing folder was closed, else an empty string.

    A folder owned by root is trusted: a container's shared volume is one. A folder or link created
    by another user, such as one in `/tmp`, is not: that user could remove and replace the rings.

    Raises:
        RingUnavailable: the folder cannot be created, or belongs to another user.
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
                f"cannot use the folder {folder} it belongs to uid {owner}. "
                "Set INFERSCOPE_DIR to a folder of your own."
            )
    if status.st_uid != os.geteuid():
        return ""
    mode, line = status.st_mode, ""
    # With INFERSCOPE_GROUP the group loses the right to write below, without a line in the log.
    open_bits = stat.S_IWOTH if group_id is not None else stat.S_IWOTH | stat.S_IWGRP
    if mode & open_bits and not mode & stat.S_ISVTX and not os.path.ismount(folder):
        try:
            folder.chmod(0o700 if mode & stat.S_IWOTH else stat.S_IMODE(mode) & ~stat.S_IWGRP)
        except OSError as error:
            raise RingUnavailable(
                f"the folder {folder} is open to other users (mode {stat.S_IMODE(mode):04o}) and "
                f"cannot be closed: {error.strerror}. Set INFERSCOPE_DIR to a folder of your own."
            ) from error
        line = f"{folder} was open to other users (mode {stat.S_IMODE(mode):04o}); now it is not"
    if group_id is None:
        return line
    try:
        os.chown(folder, -1, group_id)
        folder.chmod(0o750)
    except OSError as error:
        raise RingUnavailable(
            f"cannot let group {group_id} read {folder}: {error.strerror}. "
            "Start the engine as a member of that group, or unset INFERSCOPE_GROUP."
        ) from error
    return line


@functools.cache
def boot_id() -> str:
    """Return the ID of this boot of the machine, empty if the kernel does not report it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def find_rings(*folders: Path) -> Iterator[RingFile]:
    """Yield every readable ring in the folders (default: all folders a probe may have used).

    Files that are not rings are skipped, as are rings that another user placed there or that state
    an engine other than their folder's.
    """
    for path in ring_paths(*folders):
        try:
            reader = RingReader(path)
        except UnreadableFile:
            continue
        try:
            if path.parent in folders or is_in_place(path, reader.identity):
                beat_ns, num_bytes = reader.heartbeat_ns(), path.stat().st_size
                skew_ns = running_skew_ns(reader, read_here(boot_id())) or 0
                yield RingFile(path, owner_of(path), reader.identity, beat_ns, num_bytes, skew_ns)
        except OSError:
            continue
        finally:
            reader.close()


def ring_paths(*folders: Path) -> list[Path]:
    """Return the paths of rings that belong to a user allowed to write there.

    A folder of root that is open to others, or one with the sticky bit, is shared by several users:
    each engine's folder in it belongs to one user. Elsewhere an engine's folder belongs to the
    owner of its parent folder.
    """
    found: list[Path] = []
    for folder in folders or search_directories():
        try:
            status = folder.stat()
        except OSError:
            continue
        owner, is_shared = status.st_uid, _is_shared(status)
        trusted: dict[Path, frozenset[int]] = {}
        for path in _rings_under(folder):
            home = path.parent
            if home not in trusted:
                users = frozenset((os.geteuid(), 0, owner))
                owner_id = owner_of(home)
                trusted[home] = (
                    users | {owner_id} if is_shared or owner_id in users else frozenset()
                )
            if owner_of(path) in trusted[home]:
                found.append(path)
    return found


def is_in_place(path: Path, identity: Identity) -> bool:
    """Return whether the ring's engine matches its folder's name, as shared folders require.

    In a shared folder a name belongs to the user who created it first. Rings of this user and of
    root may have been copied anywhere.
    """
    home = path.absolute().parent
    if home.name == file_name(identity.engine_id) or owner_of(path) in (os.geteuid(), 0):
        return True
    try:
        return not _is_shared(home.parent.stat())
    except OSError:
        return False


def _is_shared(status: os.stat_result) -> bool:
    """Return whether several users share a folder: it is root's and open, or sticky as /tmp."""
    is_roots = status.st_uid == 0 and bool(status.st_mode & (stat.S_IRWXG | stat.S_IRWXO))
    return is_roots or bool(status.st_mode & stat.S_ISVTX)


def owner_of(path: Path) -> int:
    """Return the owner's user ID of a file or folder, -1 if it no longer exists."""
    try:
        return path.lstat().st_uid
    except OSError:
        return -1


def _rings_under(folder: Path, suffix: str = ".ring") -> list[Path]:
    """Return the rings in a folder and in the engines' folders in it, following no links.

    Deeper levels are not searched: INFERSCOPE_DIR may be a folder with much other content.
    """
    try:
        with os.scandir(folder) as entries:
            inside = [Path(each.path) for each in entries if each.is_dir(follow_symlinks=False)]
        return sorted(path for home in (folder, *inside) for path in home.glob(f"*{suffix}"))
    except OSError:  # a folder that was removed or may not be listed
        return []


def sampler_rings(*folders: Path) -> list[Path]:
    """Return the rings of this host's device samplers, for any engine."""
    found = []
    for folder in folders or search_directories():
        with suppress(OSError):
            found += sorted((folder / SAMPLER_ROLE).glob("*.ring"))
    return found


def find_engines(*folders: Path) -> list[EngineRings]:
    """Group the rings under the folders by user and engine, the newest engine first.

    The engine ID is the one a ring states: another user's ring cannot add records to an engine.
    """
    by_engine: dict[tuple[int, str], list[RingFile]] = {}
    for ring in find_rings(*folders):
        if ring.identity.role != SAMPLER_ROLE:
            by_engine.setdefault((ring.owner, ring.identity.engine_id), []).append(ring)
    engines = [
        EngineRings(engine_id, tuple(sorted(rings, key=lambda ring: ring.identity.start_ns)))
        for (_, engine_id), rings in by_engine.items()
    ]
    return sorted(engines, key=lambda engine: -engine.rings[-1].identity.start_real_ns)


def remove_old_rings(folder: Path, now_ns: int | None = None) -> int:
    """Delete rings of dead processes beyond a day or a gibibyte; return the number deleted.

    The newest ring of each rank of the engine that died last is always kept for the day. Only plain
    files of this user are deleted, and none that a live process writes. A ring of another boot may
    belong to a running machine that shares this folder, so it is kept for a day after its last
    heartbeat.
    """
    now_ns = time.monotonic_ns() if now_ns is None else now_ns
    dead: list[tuple[int, bool, int, Path, tuple[str, int]]] = []
    for ring in find_rings(folder):
        status = _own_file(ring.path)
        if status is not None and not ring.is_alive(now_ns):
            may_live = ring.heartbeat_ns > 0 and ring.identity.boot_id != boot_id()
            rank = ring.identity.role, ring.identity.rank
            age_ns = _age_ns(ring, status, now_ns)
            dead.append((age_ns, may_live, ring.num_bytes, ring.path, rank))
    kept_bytes = removed = 0
    last_home: Path | None = None
    last_ranks: set[tuple[str, int]] = set()
    for age_ns, may_live, num_bytes, path, rank in sorted(dead):
        if last_home is None and not may_live and rank[0] != SAMPLER_ROLE:
            last_home = path.parent
        is_of_last = path.parent == last_home and rank not in last_ranks
        if is_of_last:
            last_ranks.add(rank)
        is_room = may_live or is_of_last or kept_bytes + num_bytes <= KEEP_DEAD_BYTES
        if is_room and age_ns <= KEEP_DEAD_NS:
            kept_bytes += num_bytes
        else:
            removed += _remove(path)
    return removed + _remove_leftovers(folder)


def _age_ns(ring: RingFile, status: os.stat_result, now_ns: int) -> int:
    """Return the nanoseconds since a dead ring was written: since its last heartbeat.

    A closed ring, or one with an impossible heartbeat, is dated by its file's modification time:
    mapped rings of earlier versions do not update that on tmpfs while they are written.
    """
    me, beat_ns = ring.identity, ring.heartbeat_ns
    if beat_ns >= me.start_ns:
        is_here = me.boot_id == boot_id()
        started_ns = me.start_real_ns + beat_ns - me.start_ns
        age_ns = now_ns - beat_ns if is_here else time.time_ns() - started_ns
        if age_ns >= 0:
            return age_ns
    return time.time_ns() - status.st_mtime_ns


def _remove_leftovers(folder: Path) -> int:
    """Delete half-made rings and companion files that are older than a day; return the number."""
    removed = 0
    # A writer killed while it created its ring leaves these.
    for path in _rings_under(folder, ".ring.partial"):
        removed += _is_old(path) and _remove(path)
    try:
        homes = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return removed
    for home in homes:
        with suppress(OSError):
            for path in list(home.iterdir()):
                name = _LEFTOVER.fullmatch(path.name)
                if name and not os.path.lexists(home / f"{name[1]}.ring") and _is_old(path):
                    path.unlink()
                    if not any(home.iterdir()):
                        home.rmdir()
                        break
    return removed


def _is_old(path: Path) -> bool:
    """Return whether a path is a plain file of this user that is older than a day."""
    status = _own_file(path)
    return status is not None and time.time_ns() - status.st_mtime_ns > KEEP_DEAD_NS


def _own_file(path: Path) -> os.stat_result | None:
    """Return the status of a path, None if it is not a plain file of this user."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() else None


def _remove(path: Path) -> bool:
    """Delete a ring, its companion files and its folder if empty; return whether it is gone.

    Another process may clean up at the same time, so a missing file is not an error.
    """
    try:
        # Opened for writing: NFS grants exclusive locks on nothing else.
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise  # its writer is alive
        if not os.path.samestat(os.fstat(handle), path.lstat()):
            return False  # another cleanup removed it, and a new process has its name
        for suffix in _COMPANIONS:
            path.with_suffix(suffix).unlink(missing_ok=True)
        path.unlink()
        path.parent.rmdir()
    except OSError:  # its writer is alive, it was removed, or the folder is in use
        return not os.path.lexists(path)
    finally:
        os.close(handle)
    return True
