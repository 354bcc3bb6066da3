"""Devices of one engine beside each other: use of each rank, its skew, and ranks that are late."""

from __future__ import annotations

from inferscope.fold import DeviceTime, EngineView
from inferscope.text.lines import DIAMOND, DOT, Line, Span, frame
from inferscope.text.plots import UNKNOWN, duration, fit_name, plain, share, split_bar

_BUSY = ("prefill", "decode", "padding", "unattributed")
_NAMES = 20


def busy_share(device: DeviceTime) -> float | None:
    """Return the share of a device's wall time with steps of the engine; None without time."""
    if not device.wall_ns:
        return None
    return sum(device.seconds_by_ns.get(use, 0) for use in _BUSY) / device.wall_ns


def busy_skew(view: EngineView) -> float | None:
    """Return the busiest rank's time over the mean, less one; None with fewer than two ranks."""
    known = [value for value in map(busy_share, view.devices) if value is not None]
    mean = sum(known) / len(known) if known else 0.0
    return max(known) / mean - 1.0 if len(known) > 1 and mean else None


def ranks(view: EngineView, width: int, height: int) -> list[Line]:
    """Return a row per device since the reader began: prefill, decode and the rest of its time."""
    inner = width - 4
    late = {rank.rank: rank.overdue_ns for rank in view.ranks if rank.overdue_ns}
    lines: list[Line] = []
    for device in view.devices:
        whole = max(device.wall_ns, 1)
        parts = [device.seconds_by_ns.get(use, 0) / whole for use in ("prefill", "decode")]
        room = max(inner - _NAMES - 24, 0)
        prefill, decode = split_bar(parts, room)
        rest = " " * (room - len(prefill) - len(decode))
        lines.append(
            (
                (fit_name(plain(device.device), _NAMES - 1) + " ", "body"),
                (f"{share(busy_share(device)):>7}", "strong"),
                (f" {DIAMOND}{share(parts[0]):>6}", "prefill"),
                (f" {DOT}{share(parts[1]):>6} ", "decode"),
                (prefill, "prefill"),
                (decode, "decode"),
                (rest, "gauge"),
            )
        )
    for rank, overdue_ns in sorted(late.items()):
        text = f"the others have waited {duration(overdue_ns)} for rank {rank}"
        lines.append(((text, "alarm"),))
    if not lines:
        lines = [((f"{UNKNOWN} no device time is recorded here", "dim"),)]
    skew = busy_skew(view)
    note = f"{view.num_ranks_seen} of {view.num_ranks} ranks seen"
    if view.has_ended:  # then none is seen
        note = "1 rank" if view.num_ranks == 1 else f"{view.num_ranks} ranks"
    note += "" if skew is None else f", skew {share(skew)}"
    foot: Span = ("busy; prefill, decode", "dim")
    return frame(f"Ranks of {plain(view.engine_id)}", lines, width, height, note=note, foot=foot[0])
