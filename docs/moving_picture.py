"""The README's moving picture: frames of the real screen over a recording, as one animated SVG.

    python -m docs.moving_picture samples/demo.isr docs/pictures/moving.svg

Each frame is what `inferscope replay FILE --at S --press KEYS --screenshot` writes. Only a style's
animation shows one after the other, so the picture needs no script and no network.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

SIZE = "120x34"


class Frame(NamedTuple):
    """One picture of the screen."""

    at_s: float
    """Time in the recording."""
    keys: tuple[str, ...]
    shown_s: float
    """How long it is shown."""


FRAMES = (
    *(Frame(at, (), 0.7) for at in (8, 11, 14)),
    Frame(15, (), 1.5),
    Frame(15, ("down", "down", "enter"), 3.5),
    Frame(15, ("3",), 3.5),
    Frame(15, ("4",), 3),
    Frame(15, ("5",), 2.5),
    Frame(15, ("6",), 3),
)


def picture(recording: Path, frame: Frame, path: Path) -> str:
    """Return the SVG of one frame."""
    command = [sys.executable, "-m", "inferscope", "replay", str(recording), "--size", SIZE]
    command += ["--at", str(frame.at_s), "--screenshot", str(path)]
    if frame.keys:
        command += ["--press", *frame.keys]
    subprocess.run(command, check=True)
    return path.read_text(encoding="utf-8")


def animated(pictures: list[str]) -> str:
    """Return one SVG that shows the frames in turn, and the first if nothing may move."""
    whole_s = sum(frame.shown_s for frame in FRAMES)
    box = re.search(r'viewBox="([^"]+)"', pictures[0])
    if box is None:
        raise ValueError("a frame has no viewBox")
    styles, groups, begin_s = [], [], 0.0
    for number, (frame, text) in enumerate(zip(FRAMES, pictures, strict=True)):
        from_share, to_share = (100 * at / whole_s for at in (begin_s, begin_s + frame.shown_s))
        begin_s += frame.shown_s
        # A picture in a page loads no font, so its fonts are left out.
        text = re.sub(r"@font-face \{.*?\n    \}\n", "", text, flags=re.DOTALL)
        body = re.sub(r"^.*?<svg[^>]*>|</svg>\s*$", "", text, flags=re.DOTALL)
        body = re.sub(r"<!--.*?-->", "", body)
        body = re.sub(r"\n\s*", "\n", body).strip()
        styles.append(
            f"@keyframes f{number} {{ 0%, 100% {{ visibility: hidden }} "
            f"{from_share:.3f}%, {to_share - 0.001:.3f}% {{ visibility: visible }} "
            f"{to_share:.3f}% {{ visibility: hidden }} }}\n"
            f".f{number} {{ visibility: {'hidden' if number else 'visible'}; "
            f"animation: f{number} {whole_s:g}s step-end infinite }}"
        )
        groups.append(f'<g class="f{number}">\n{body}\n</g>')
    style = "\n".join(styles)
    still = "@media (prefers-reduced-motion: reduce) { g { animation: none !important } }"
    return (
        f'<svg class="rich-terminal" viewBox="{box[1]}" xmlns="http://www.w3.org/2000/svg">\n'
        f"<style>\n{style}\n{still}\n</style>\n" + "\n".join(groups) + "\n</svg>\n"
    )


def main() -> None:
    """Write the picture."""
    recording, target = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        pictures = [
            picture(recording, frame, Path(folder) / f"{number}.svg")
            for number, frame in enumerate(FRAMES)
        ]
    target.write_text(animated(pictures), encoding="utf-8")


if __name__ == "__main__":
    main()
