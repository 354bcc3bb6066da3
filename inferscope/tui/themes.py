"""The two themes: one meaning per hue, legible on dark and on light.

Prefill is orange and decode blue (distinct for colour-blind users), alarm is red and bold, all else
is a weight of the body text. A shape repeats each hue; with NO_COLOR, Textual turns all of it grey.
"""

from __future__ import annotations

import os

from textual.theme import Theme

DARK = Theme(
    name="inferscope-dark",
    primary="#58a6e8",
    secondary="#e8a33d",
    accent="#58a6e8",
    warning="#e8a33d",
    error="#ff6b6b",
    success="#58a6e8",
    foreground="#d8dee6",
    background="#0f1318",
    surface="#161c23",
    panel="#1d242d",
    dark=True,
    variables={
        "prefill": "#e8a33d",
        "decode": "#58a6e8",
        "alarm": "#ff6b6b",
        "dim": "#8592a0",
        "frame": "#3b4753",
        "bar": "#93a1af",
        "track": "#1b222a",
        "focus": "#7d8fa1",
        "cursor": "#26323f",
    },
)
LIGHT = Theme(
    name="inferscope-light",
    primary="#0b64b0",
    secondary="#b35c00",
    accent="#0b64b0",
    warning="#b35c00",
    error="#c01c28",
    success="#0b64b0",
    foreground="#1c232b",
    background="#fbfbf9",
    surface="#f0f0ec",
    panel="#e6e6e0",
    dark=False,
    variables={
        "prefill": "#b35c00",
        "decode": "#0b64b0",
        "alarm": "#c01c28",
        "dim": "#616b76",
        "frame": "#b9bfc6",
        "bar": "#6f7a86",
        "track": "#ebebe6",
        "focus": "#66717d",
        "cursor": "#dbe6f0",
    },
)


def theme_of_terminal() -> str:
    """Return the theme from COLORFGBG, which some terminals set; dark without it."""
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return LIGHT.name if background in ("7", "15") else DARK.name
