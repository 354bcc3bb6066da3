"""First line of the screen: the observed engine, how current the data is, and caveats."""

from __future__ import annotations

from inferscope.cost import ENOUGH_STEPS
from inferscope.fold import EngineView, Health
from inferscope.text.labels import format_window
from inferscope.text.lines import DOT, TRIANGLE, Line, Role, Span, fit_line, spread, width_of
from inferscope.text.plots import UNKNOWN, clock, count, duration, moment, plain, share
from inferscope.text.scene import Scene

_NARROW = 100


def header(scene: Scene, width: int) -> Line:
    """Return the header in exactly `width` cells; names are shortened for caveats."""
    right = _right(scene, is_narrow=width < _NARROW)
    left: list[Span] = [(" InferScope", "title")]
    view = scene.view
    if view is None:
        if scene.title:
            left.append((f"  {plain(scene.title)}", "dim"))
        return spread(tuple(left), right, width)
    optional: list[Span] = [
        (f"  {plain(view.model) or UNKNOWN}", "strong"),
        (f"  {plain(f'{view.engine} {view.version}'.strip())}", "body"),
        (f" pid {_pids(view)}", "dim"),
        (f"  {plain(view.device) or UNKNOWN}", "body"),
    ]
    if scene.num_engines > 1:
        index = scene.engine_idx % scene.num_engines + 1
        optional.insert(1, (f"  engine {index}/{scene.num_engines}", "dim"))
    room = width - width_of(right) - len(" InferScope") - 1
    for text, role in optional:
        if len(text) > room:
            continue
        left.append((text, role))
        room -= len(text)
    return spread(tuple(left), right, width)


def status_line(scene: Scene, width: int) -> Line:
    """Return the only line of a tiny screen."""
    view = scene.view
    if view is None:
        return fit_line(_state(scene), width)
    counts = f" run {view.num_running} wait {view.num_waiting}"
    return spread(((counts, "body"),), _state(scene), width)


def caveats(scene: Scene) -> list[str]:
    """Return what makes the numbers on this screen incomplete."""
    view, snapshot = scene.view, scene.snapshot
    notes: list[str] = []
    if scene.failure:
        notes.append("no new data")
    if view is None or snapshot is None:
        return notes
    health = view.health
    if health.probe_state == "lost" or not (view.is_alive or view.has_ended):
        notes.append("engine lost")
    elif health.probe_state not in ("on", "") and not view.has_ended:
        notes.append(f"probe {health.probe_state.replace('_', ' ')}")
    if view.ledger_missing:
        notes.append(view.ledger_missing)
    if health.unsupported:
        features = ", ".join(name.partition(":")[0] for name in health.unsupported)
        notes.append(f"unsupported: {plain(features)}")
    skewed = [f"{one.role} {one.rank}" for one in health.skewed_clocks if not one.is_corrected]
    if skewed:
        notes.append(f"wrong clock: {plain(', '.join(skewed))}")
    if health.num_lost:
        notes.append(f"{count(health.num_lost)} records lost")
    if health.num_unjoined:
        notes.append(f"{count(health.num_unjoined)} unjoined")
    num_late = sum(row.joined_late and row.state != "done" for row in view.requests)
    if num_late:
        notes.append(f"{num_late} joined late")
    model = view.cost_models[0] if view.cost_models else None
    if model is not None and model.is_provisional and model.num_steps:
        num_steps = min(model.num_steps, ENOUGH_STEPS)
        notes.append(f"shares provisional: {num_steps} of {ENOUGH_STEPS} steps learned")
    return notes


def format_probe(health: Health) -> str:
    """Return the probe's overhead: time that steps wait for, and time hidden behind the device."""
    total, hidden = health.probe_share, health.probe_hidden_share
    if total is None or not hidden:
        return share(total)
    return f"{share(total - hidden)} + {share(hidden)} hidden"


def _right(scene: Scene, *, is_narrow: bool) -> Line:
    spans: list[Span] = []
    view = scene.view
    notes = caveats(scene)
    if notes:
        spans.append((f"{TRIANGLE} {notes[0] if is_narrow else ', '.join(notes)}  ", "alarm"))
    if view is not None and view.is_synthetic:
        spans.append(("synthetic  ", "strong"))
    spans += _state(scene)
    window = format_window(scene.window_ns)
    real_ns = scene.snapshot.real_ns if scene.snapshot else 0
    is_past = scene.snapshot is not None and scene.snapshot.mode in ("ended", "replay")
    if is_narrow:
        if is_past:
            spans.append((f"{moment(real_ns)}  ", "body"))
        spans.append((f"win {window} ", "dim"))
        return tuple(spans)
    probe = format_probe(view.health) if view else UNKNOWN
    spans.append((f"{scene.refresh_hz:g} Hz  win {window}  probe {probe}  ", "dim"))
    at = moment(real_ns) if is_past else clock(real_ns)
    spans.append((f"{at} ", "body"))
    return tuple(spans)


def _state(scene: Scene) -> Line:
    if scene.is_frozen:
        behind = f" -{duration(scene.behind_ns)}" if scene.behind_ns else ""
        return ((f"‖ frozen{behind}  ", "strong"),)
    if scene.snapshot is None:
        return (("○ waiting  ", "dim"),)
    mode = scene.snapshot.mode
    mark, role = _MODES.get(mode, ("○", "body"))
    return ((f"{mark} {mode}  ", role),)


_MODES: dict[str, tuple[str, Role]] = {
    "live": (DOT, "strong"),
    "paused": ("‖", "strong"),
    "replay": ("▸", "strong"),
    "ended": ("○", "dim"),
}


def _pids(view: EngineView) -> str:
    if not view.pids:
        return UNKNOWN
    more = f"+{len(view.pids) - 1}" if len(view.pids) > 1 else ""
    return f"{view.pids[0]}{more}"
