"""Releases of CUPTI on this machine: headers to compile against, and libraries to ask.

INFERSCOPE_CUPTI_WHEELS names a folder of unpacked wheels (nvidia-cuda-cupti*, and for cuda.h one
nvidia-cuda-runtime*); without it installed wheels and toolkits are looked at. None is in the
repository.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from inferscope.sampler.cupti.library import OLDEST_VERSION

VARIABLE = "INFERSCOPE_CUPTI_WHEELS"
_VERSION = re.compile(r"#define\s+CUPTI_API_VERSION\s+(\d+)")
_COMPILER = shutil.which("c++")


class Release(NamedTuple):
    """One release's headers."""

    version: int
    """CUPTI_API_VERSION."""
    include: Path
    cuda: Path
    """The folder of cuda.h."""

    @property
    def library(self) -> Path | None:
        """Return the release's libcupti, if it is here too."""
        for folder in ("lib", "lib64"):
            found = sorted((self.include.parent / folder).glob("libcupti.so.1[2-9]"))
            if found:
                return found[0]
        return None


def _roots() -> list[Path]:
    given = os.environ.get(VARIABLE)
    if given:
        return [Path(path) for path in glob.glob(f"{given}/*/nvidia/*/include")]
    inside = [Path(path) for root in sys.path for path in glob.glob(f"{root}/nvidia/*/include")]
    return inside + [Path(path) for path in glob.glob("/usr/local/cuda*/include")]


def _releases() -> list[Release]:
    roots = _roots()
    cudas = [root for root in roots if (root / "cuda.h").exists()]
    found: dict[int, Release] = {}
    for root in roots:
        header = root / "cupti_version.h"
        if not (root / "cupti_pmsampling.h").exists() or not header.exists() or not cudas:
            continue
        version = _VERSION.search(header.read_text(encoding="utf-8", errors="replace"))
        assert version is not None
        # cuda.h declares types alone for these headers: any release's will do.
        cuda = root if root in cudas else cudas[0]
        found.setdefault(int(version[1]), Release(int(version[1]), root, cuda))
    return [found[version] for version in sorted(found)]


RELEASES = _releases()


def each_release(*, oldest: int = OLDEST_VERSION) -> pytest.MarkDecorator:
    """Parametrise a test by release, or skip it with the reason."""
    found = [release for release in RELEASES if release.version >= oldest]
    if found and _COMPILER is not None:
        return pytest.mark.parametrize("release", found, ids=[str(each.version) for each in found])
    reason = "no C++ compiler" if found else f"no CUPTI headers: {VARIABLE} names no such folder"
    return pytest.mark.parametrize(
        "release", [pytest.param(None, marks=pytest.mark.skip(reason=reason))]
    )


def library_of(version: int) -> Path | None:
    """Return the real library of one release, None where it is not here."""
    return next((one.library for one in RELEASES if one.version == version), None)


def compile_with(release: Release, source: Path, *options: str, out: Path) -> Path:
    """Compile a C++ file against a release's headers."""
    assert _COMPILER is not None
    command = [
        _COMPILER, "-std=c++17", "-Wall", "-Wno-deprecated-declarations", *options,
        "-isystem", str(release.include), "-isystem", str(release.cuda),
        "-o", str(out), str(source),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out
