"""Configuration of the documentation site: Sphinx, MyST and Furo.

Chosen over Zensical 0.0.73: its strict mode passes links to files and folders that the site lacks,
and its API pages need plug-ins. With `-W` Sphinx refuses every broken link and anchor, and autodoc
is part of it.
"""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx.addnodes import download_reference, pending_xref
from sphinx.application import Sphinx

from inferscope import __version__

project = "InferScope"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # `array.array[int]` cannot be evaluated on Python 3.11
exclude_patterns = ["requirements.txt"]
_DOCS = Path(__file__).parent


def show_repository_paths(app: Sphinx, document: nodes.document) -> None:
    """Replace each link to a file outside of docs/ that exists by its text and path."""
    for kind in (download_reference, pending_xref):
        for link in list(document.findall(kind)):
            target = str(link.get("reftarget", "")).partition("#")[0]
            path = (_DOCS / Path(app.env.docname).parent / target).resolve()
            path = path if path.exists() else path.with_suffix(".md")  # MyST drops the suffix
            if target and path.exists() and (_DOCS not in path.parents or path.is_dir()):
                shown = path.relative_to(_DOCS.parent).as_posix()
                text = nodes.literal("", shown)
                link.replace_self([*link.children, nodes.Text(" ("), text, nodes.Text(")")])


def setup(app: Sphinx) -> None:
    """Add the replacement of links; Sphinx calls this."""
    app.connect("doctree-read", show_repository_paths)
