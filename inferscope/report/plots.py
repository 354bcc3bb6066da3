"""Plots as inline SVG, in the colours of the page around them.

A plot is drawn with matplotlib in placeholder colours, each of which stands for a CSS variable of
the page; text stays text. So one picture serves light, dark and paper, and can be searched and read
aloud. No name from a recording reaches matplotlib: `draw` writes names over placeholders.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from markupsafe import Markup
from matplotlib import style as matplotlib_style
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas

from inferscope.report.escaping import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, DIM, FRAME, PAPER = "#000001", "#000002", "#000003", "#000004"
PREFILL, DECODE, ALARM, BAR, TRACK = "#000005", "#000006", "#000007", "#000008", "#000009"
_VARIABLES = {
    INK: "ink",
    DIM: "dim",
    FRAME: "frame",
    PAPER: "paper",
    PREFILL: "prefill",
    DECODE: "decode",
    ALARM: "alarm",
    BAR: "bar",
    TRACK: "track",
}
PLOT = "\ue000"
"""Placeholder of the plot's ID on its page; no text that is `visible` holds this character."""
_SVG = "http://www.w3.org/2000/svg"
_LINK = "{http://www.w3.org/1999/xlink}href"
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}")
_DROPPED = {"font-family", "font-stretch", "font-variant", "font-style"}
_PER_INCH = 72
_SETTINGS = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": DIM,
    "axes.edgecolor": FRAME,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlecolor": INK,
    "axes.labelsize": 9.5,
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "xtick.color": FRAME,
    "xtick.labelcolor": DIM,
    "ytick.color": FRAME,
    "ytick.labelcolor": DIM,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "grid.color": TRACK,
    "lines.linewidth": 1.6,
    "patch.linewidth": 0,
    "hatch.linewidth": 1.0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "path.simplify": True,
}


def draw(
    size: tuple[float, float],
    plot: Callable[[Canvas], None],
    *,
    label: str,
    tooltips: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
) -> Markup:
    """Return a plot as an SVG element.

    Args:
        size: width and height in inches; the page scales it to its own width.
        plot: function that draws into the canvas in the colours of this module.
        label: description for readers who do not see the picture.
        tooltips: texts by the `gid` of drawn elements, shown where the pointer rests.
        names: texts from a recording by the placeholder that was drawn for each. Fonts and
            measures of the picture thus depend on no name.
    """
    file = io.StringIO()
    with matplotlib_style.context(["default", {**_SETTINGS, "svg.hashsalt": ""}]):
        canvas = Canvas(figsize=size, layout="constrained")
        FigureCanvasSVG(canvas)
        plot(canvas)
        canvas.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(file.getvalue())
    _embed(root, size, label)
    for element in root.iter():
        _restyle(element)
        tooltip = (tooltips or {}).get(element.get("id", "").removeprefix(f"{PLOT}-"))
        if tooltip is not None:
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = visible(tooltip)
            element.insert(0, title)
        if element.text is not None and element.text in (names or {}):
            element.text = visible((names or {})[element.text])
    ElementTree.register_namespace("", _SVG)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def bare(axes: Axes, *, left: bool = True) -> None:
    """Remove the frame of a plot but its bottom line, and optionally its left one."""
    axes.spines["left"].set_visible(left)
    if not left:
        axes.tick_params(axis="y", length=0)


def _embed(root: ElementTree.Element, size: tuple[float, float], label: str) -> None:
    """Make a document an element of a page: scaled by it, and with a name."""
    for child in list(root):  # metadata, and a style sheet that would apply to the whole page
        if child.tag.endswith("metadata") or child.find(f"{{{_SVG}}}style") is not None:
            root.remove(child)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    width, height = (inches * _PER_INCH for inches in size)
    root.set("viewBox", f"0 0 {width:g} {height:g}")
    root.set("id", PLOT)
    root.set("role", "img")
    root.set("aria-label", label)


def _restyle(element: ElementTree.Element) -> None:
    """Set an element to the colours and fonts of the page, and to IDs that are unique there."""
    identity = element.get("id")
    if identity is not None and identity != PLOT:
        element.set("id", f"{PLOT}-{identity}")
    target = element.get(_LINK)
    if target is not None:  # SVG 2 links need no namespace
        del element.attrib[_LINK]
        element.set("href", f"#{PLOT}-{target.removeprefix('#')}")
    if "clip-path" in element.attrib:
        element.set("clip-path", element.attrib["clip-path"].replace("#", f"#{PLOT}-"))
    pairs = [pair.partition(":") for pair in element.get("style", "").split(";") if pair.strip()]
    style = {attribute.strip(): value.strip() for attribute, _, value in pairs}
    for attribute in ("fill", "stroke"):
        if attribute in element.attrib:
            style[attribute] = element.attrib.pop(attribute)
    style = {
        attribute: _COLOUR.sub(_variable, value).replace("url(#", f"url(#{PLOT}-")
        for attribute, value in style.items()
        if attribute not in _DROPPED
    }
    if element.tag == f"{{{_SVG}}}text":
        style.setdefault("fill", "var(--ink)")
    if style:
        element.set("style", "; ".join(": ".join(pair) for pair in style.items()))


def _variable(match: re.Match[str]) -> str:
    """Return the CSS variable of a placeholder; another colour would not follow the page's."""
    return f"var(--{_VARIABLES[match[0]]})"
