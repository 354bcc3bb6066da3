"""Labels of causes, phases and states."""

from __future__ import annotations

from inferscope.cost import split_verdict
from inferscope.fold import EngineView
from inferscope.records import CAUSE_ROWS, cause_named
from inferscope.text.lines import DIAMOND, DOT, TRIANGLE, Role

SYNTHETIC = "Synthetic: its records are marked as generated, not measured."

CAUSE_MEANINGS = {row.name: row.label for row in CAUSE_ROWS}

STATE_MARKS: dict[str, tuple[str, Role]] = {
    "arriving": ("·", "dim"),
    "waiting": ("○", "body"),
    "prefill": (DIAMOND, "prefill"),
    "decode": (DOT, "decode"),
    "held": (TRIANGLE, "alarm"),
    "done": (" ", "dim"),
}

BAD_FINISHES = frozenset({"timeout", "server_abort", "rejected", "error", "engine_lost", "shed"})

BINDINGS: dict[str, str] = {
    "none": "no limit reached",
    "slots": "all sequence slots taken",
    "blocks": "no free KV blocks",
    "budget": "token budget of a step used up",
}


def cause_role(cause: str) -> Role:
    """Return the colour of a cause: that of its phase, or alarm for lost work."""
    row = cause_named(cause)
    return "alarm" if row.is_loss else row.phase or "bar"


def more_or_less(difference: float) -> str:
    """Return a relative difference in words: `9% less`, `0.4% more`."""
    percent = 100 * abs(difference)
    digits = 0 if percent >= 1 else 1
    return f"{percent:.{digits}f}% {'less' if difference < 0 else 'more'}"


def view_verdict(view: EngineView) -> str:
    """Return why the split of an engine's last steps is not reliable; empty if it is."""
    model = view.cost_models[0] if view.cost_models else None
    is_provisional = model is not None and model.is_provisional
    return split_verdict(view.model_residual, is_provisional=is_provisional)


def has_gpu(view: EngineView) -> bool:
    """Return whether the device is a GPU."""
    device = view.device.lower()
    return bool(device) and "cpu" not in device


def format_listed(view: EngineView) -> str:
    """Return the counts of listed requests: `3 live, 200 of 607 done in 60 s`."""
    num_live = min(view.num_requests, len(view.requests))
    num_done = len(view.requests) - num_live
    live = _of_all(num_live, view.num_requests)
    done = _of_all(num_done, max(view.num_finished_since, num_done))
    return f"{live} live, {done} done in {format_window(view.listed_ns)}"


def _of_all(num: int, num_all: int) -> str:
    return str(num) if num == num_all else f"{num} of {num_all}"


def format_window(window_ns: int) -> str:
    """Return the name of a window: `10 s`, `60 s`, `5 min`."""
    window_s = round(window_ns / 1e9)
    if window_s > 60 and window_s % 60 == 0:
        return f"{window_s // 60} min"
    return f"{window_s} s"
