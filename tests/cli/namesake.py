"""The package that pip installs as `inferscope`, which is of another project, as unpacked."""

from __future__ import annotations

from pathlib import Path

METADATA = """Metadata-Version: 2.1
Name: inferscope
Version: 0.1.1
Summary: Python-package for inferscope mlops service
"""


def unpack(site: Path, *, over: Path | None = None) -> Path:
    """Make a folder of installed packages with it.

    Args:
        site: the folder to make.
        over: our own package, which was installed there before.
    """
    package, described = site / "inferscope", site / "inferscope-0.1.1.dist-info"
    package.mkdir(parents=True)
    described.mkdir()
    for path in over.iterdir() if over else ():
        (package / path.name).symlink_to(path)
    (package / "__init__.py").unlink(missing_ok=True)
    (package / "__init__.py").write_text("from .client import Client\n", encoding="utf-8")
    (package / "client.py").write_text("class Client: ...\n", encoding="utf-8")
    (described / "METADATA").write_text(METADATA, encoding="utf-8")
    return site
