"""Checks of `doctor` inside a Kubernetes pod: the lines that the pod's manifest lacks.

Engine and collector share only the folder of the rings: both containers have to mount it as a
volume, and both need its path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from inferscope.cli.doctor.device import Check

IN_A_POD = "KUBERNETES_SERVICE_HOST"
"""Variable that the kubelet sets in every container."""
_MOUNTS = Path("/proc/self/mountinfo")
_FOLDER = "/run/inferscope"
_DIR = """in each container:
env:
  - {name: INFERSCOPE_DIR, value: %s}"""
_VOLUME = """in each container, and in the pod:
volumeMounts:
  - {name: rings, mountPath: %s}
volumes:
  - {name: rings, emptyDir: {medium: Memory, sizeLimit: 1Gi}}"""
_SWITCH = """in the engine's container:
env:
  - {name: INFERSCOPE, value: "1"}"""
_NAME = """in the engine's container:
env:
  - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
  - {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
  - {name: INFERSCOPE_ENGINE_ID, value: $(POD_NAMESPACE).$(POD_NAME)}"""


def pod(
    environment: Mapping[str, str], *, has_engine: bool, mounts: Path = _MOUNTS
) -> Iterator[Check]:
    """Yield the checks of the container that this process runs in; none outside a pod.

    Args:
        environment: environment of this process.
        has_engine: whether an engine with a plug-in is installed here.
        mounts: the kernel's table of mounts.
    """
    if not environment.get(IN_A_POD):
        return
    folder = environment.get("INFERSCOPE_DIR", "")
    if not folder:
        yield Check("pod: rings", False, "INFERSCOPE_DIR is not set", _DIR % _FOLDER)
    where = folder or _FOLDER
    if _is_own(where, mounts):
        found = f"{where} is private to this container: no other container can read it"
        yield Check("pod: volume", False, found, _VOLUME % where)
    elif folder:
        yield Check("pod: rings", True, f"{folder} is a volume that containers can share")
    if not has_engine:
        return
    if environment.get("INFERSCOPE") != "1":
        yield Check("pod: engine", False, "INFERSCOPE is not 1: engines are not observed", _SWITCH)
    if not environment.get("INFERSCOPE_ENGINE_ID"):
        found = "INFERSCOPE_ENGINE_ID is not set: engines get generated IDs"
        yield Check("pod: name", False, found, _NAME)


def _is_own(folder: str, mounts: Path) -> bool:
    """Return whether only the container's root is mounted at a folder or above it."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False  # unknown, so no warning
    points = [Path(fields[4]) for line in lines if len(fields := line.split()) > 4]
    wanted = Path(folder)
    return all(str(point) == "/" or not wanted.is_relative_to(point) for point in points)
