"""Where rings are, whose they are, and which engines are alive.

    INFERSCOPE_DIR/<engine_id>/<role>-<rank>-<pid>.ring   (+ .control beside it)

Without INFERSCOPE_DIR a probe writes to /tmp/inferscope-UID: services, cron jobs and shells of a
user have that in common, and it survives logout. XDG_RUNTIME_DIR is set in some of them only and
removed at logout, so it is written to only where another user holds the name in /tmp. Readers
search every folder that a probe of the user may have written to.

Alive is decided by the heartbeat in the header, never by the pid: a reader in another pid
namespace sees other pids. Whether a ring may be removed is decided by its writer's lock as well: a
process that is stopped does not beat, and is not dead.
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
"""A heartbeat older than this is a dead, stopped or hung process; probes beat every 100 ms."""
KEEP_DEAD_NS = 24 * 3600 * 1_000_000_000
KEEP_DEAD_BYTES = 1 << 30
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of `flock` on a file system without locks: the heartbeat alone decides there."""
_TMP = Path("/tmp")
_MAX_NAME = 100
_COMPANIONS = (
    *(".control", ".profile", ".profile-error"),
    *(".trace.json", ".trace.partial", ".trace.partial.tmp"),
)
"""What stands beside a ring: its control byte, a request for a profile, and the answer."""
_LEFTOVER = re.compile(r"(.+-\d+-\d+(?:\.\d+)?)(?:" + "|".join(map(re.escape, _COMPANIONS)) + ")")
"""The name of such a file, and of its ring without the suffix."""


class RingFile(msgspec.Struct, frozen=True):
    """One ring as found on disk."""

    path: Path
    owner: int
    identity: Identity
    heartbeat_ns: int
    num_bytes: int
    skew_ns: int = 0
    """What to add to its times where its process runs, in another time namespace."""

    def is_alive(self, now_ns: int) -> bool:
        """Tell whether its process has said so lately, in this boot of the machine."""
        is_this_boot = self.identity.boot_id == boot_id()
        return is_this_boot and abs(now_ns - self.heartbeat_ns - self.skew_ns) < ALIVE_NS


class EngineRings(msgspec.Struct, frozen=True):
    """The rings of one engine, oldest first; all belong to one user."""

    engine_id: str
    rings: tuple[RingFile, ...]

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that write them."""
        return tuple(sorted({ring.identity.pid for ring in self.rings}))

    def is_alive(self, now_ns: int) -> bool:
        """Tell whether any of its processes is alive."""
        return any(ring.is_alive(now_ns) for ring in self.rings)


def file_name(given: str) -> str:
    """Return the name as one that may be a file's: all processes make the same one of it."""
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

    Folders of other users are left out, for they could hold anything; but root reads those of
    services with a private /tmp as well.
    """
    found = [ring_directory()]
    if not os.environ.get("INFERSCOPE_DIR"):
        runtime = _runtime_directory()
        found += [_usual_directory(), *([] if runtime is None else [runtime])]
        found.append(Path(f"/run/user/{os.getuid()}/inferscope"))
        found = [*filter(_is_usable, found)]
        if os.geteuid() == 0:
            for private in sorted(_TMP.glob("systemd-private-*")):
                # Any user can make a folder of this name in /tmp; systemd's belong to root.
                if _is_roots(private) and _is_roots(private / "tmp"):
                    inside = sorted(private.glob("tmp/inferscope-*"))
                    found += [folder for folder in inside if not folder.is_symlink()]
    return tuple({_file_of(folder): folder for folder in reversed(found)}.values())[::-1]


def reading_from(folder: Path) -> tuple[Path, ...]:
    """Return what a reader of a folder reads: all that there is where it is the usual one."""
    return search_directories() if folder.absolute() == ring_directory() else (folder,)


def names_of(folders: Iterable[Path]) -> str:
    """Return the folders in words, for a message."""
    return ", ".join(map(str, folders))


def _usual_directory() -> Path:
    return _TMP / f"inferscope-{os.getuid()}"


def _runtime_directory() -> Path | None:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "inferscope" if runtime and os.access(runtime, os.W_OK) else None


def _is_usable(folder: Path) -> bool:
    """Return whether a folder is missing, or is a real one of this user's or root's."""
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
    """Return what is equal for two names of one folder."""
    try:
        status = folder.stat()
    except OSError:
        return folder
    return status.st_dev, status.st_ino


def make_private(folder: Path, *, group_id: int | None = None) -> str:
    """Make the folder for its owner (and a group) alone, or check whose it is.

    A folder of ours that everybody may write to is closed to others, and one that its group may
    write to loses that right; one with the sticky bit, or a volume of its own, is left as it is.

    Returns:
        A line for the log where an existing folder was closed, else nothing.

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
    """Return the id of this boot of the machine, empty where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def find_rings(*folders: Path) -> Iterator[RingFile]:
    """Yield every readable ring under the folders, by default of all that a probe may have used.

    Files that are not rings are passed over, and rings that another user has put there, or that
    state the engine of another folder.
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
    """Return the rings under the folders that belong to a user who may write there.

    A folder of root's that is open to others, or one with the sticky bit, is shared by several
    users: each engine's folder in it is one user's. Elsewhere an engine's folder belongs to the
    owner of the folder around it.
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
                whose = owner_of(home)
                trusted[home] = users | {whose} if is_shared or whose in users else frozenset()
            if owner_of(path) in trusted[home]:
                found.append(path)
    return found


def is_in_place(path: Path, identity: Identity) -> bool:
    """Return whether a ring may state its engine: its folder's name, where users share a folder.

    A name in a shared folder belongs to the user who made it first. Rings of this user and of root
    may have been copied anywhere.
    """
    home = path.absolute().parent
    if home.name == file_name(identity.engine_id) or owner_of(path) in (os.geteuid(), 0):
        return True
    try:
        return not _is_shared(home.parent.stat())
    except OSError:
        return False


def _is_shared(status: os.stat_result) -> bool:
    """Return whether a folder is for several users: root's and open to them, or as /tmp is."""
    is_roots = status.st_uid == 0 and bool(status.st_mode & (stat.S_IRWXG | stat.S_IRWXO))
    return is_roots or bool(status.st_mode & stat.S_ISVTX)


def owner_of(path: Path) -> int:
    """Return whose a file or folder is, -1 where it is gone."""
    try:
        return path.lstat().st_uid
    except OSError:
        return -1


def _rings_under(folder: Path, suffix: str = ".ring") -> list[Path]:
    """Return the rings in a folder and in the engines' folders in it, through no links.

    No deeper: INFERSCOPE_DIR may be a folder with much else in it.
    """
    try:
        with os.scandir(folder) as entries:
            inside = [Path(each.path) for each in entries if each.is_dir(follow_symlinks=False)]
        return sorted(path for home in (folder, *inside) for path in home.glob(f"*{suffix}"))
    except OSError:  # a folder that went away, or may not be looked into
        return []


def sampler_rings(*folders: Path) -> list[Path]:
    """Return the rings of what has sampled this host's devices, whichever engine they are for."""
    found = []
    for folder in folders or search_directories():
        with suppress(OSError):
            found += sorted((folder / SAMPLER_ROLE).glob("*.ring"))
    return found


def find_engines(*folders: Path) -> list[EngineRings]:
    """Group the rings under the folders by user and engine, the newest engine first.

    An engine id is what a ring states: another user's ring cannot add records to an engine.
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
    """Delete rings of dead processes beyond a day or a gibibyte; return how many.

    Of the engine that died last the newest ring of each rank is kept for the day in any case.
    Only plain files of this user are touched, and none that a living process writes. Another
    boot need not be over: its machine may share this folder. Its rings are kept for a day after
    their last heartbeat.
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
    """Return how long a dead ring has not been written: since its last heartbeat.

    Of a ring that was closed, and of a heartbeat that cannot be, the file's own time tells: rings
    that are mapped, those of earlier versions, do not move it on tmpfs while they are written.
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
    """Delete what rings have left behind for a day: half-made ones, and the files beside them."""
    removed = 0
    # Writers that were killed while they made their ring left these.
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
    """Return whether a path is a plain file of this user's that has been left alone for a day."""
    status = _own_file(path)
    return status is not None and time.time_ns() - status.st_mtime_ns > KEEP_DEAD_NS


def _own_file(path: Path) -> os.stat_result | None:
    """Return what the path is, None where it is not a plain file of this user."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() else None


def _remove(path: Path) -> bool:
    """Delete a ring, the files beside it and its folder if that is empty; tell whether it is gone.

    Another process may be tidying up beside us: whatever is gone already is well.
    """
    try:
        # For writing: NFS gives exclusive locks on nothing else.
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise  # its writer lives
        if not os.path.samestat(os.fstat(handle), path.lstat()):
            return False  # another cleanup removed it, and a new process has its name
        for suffix in _COMPANIONS:
            path.with_suffix(suffix).unlink(missing_ok=True)
        path.unlink()
        path.parent.rmdir()
    except OSError:  # its writer lives, somebody else removed it, or the folder is still in use
        return not os.path.lexists(path)
    finally:
        os.close(handle)
    return True
