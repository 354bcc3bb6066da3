"""Autoscaling signals: queued work, predicted wait and headroom; a pure function of one view.

    predicted wait = queued prompt tokens / prompt tokens computed per second with work
    headroom       = 1 - the highest use of: slots, KV blocks, the steps' token budget

The wait is a model: it assumes that the queue is processed at the window's prompt rate, with
decodes in the same steps. Seconds without a request carry no information about that rate and are
left out. Headroom is below 0 if there are more requests than slots. A device that is never idle may
still have headroom, because batches grow; idle time is not part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from inferscope.fold import EngineView

STALE_NS = 5_000_000_000
"""Maximum age in ns of a view that describes the present."""


@dataclass(frozen=True)
class Demand:
    """Demand of one engine; None fields are unknown."""

    queued_prompt_tokens: int | None
    predicted_queue_seconds: float | None
    headroom_ratio: float | None
    requests_admissible: int | None


def demand_of(view: EngineView, *, lag_ns: int) -> Demand | None:
    """Return an engine's demand; None if its view is stale.

    Args:
        view: view of the engine.
        lag_ns: age of the view.
    """
    is_known = view.is_alive and view.health.probe_state == "on" and view.has_scheduler
    if not is_known or lag_ns > STALE_NS:
        return None
    return Demand(view.queued_prompt_tokens, _wait_s(view), _headroom(view), view.num_admissible)


def _wait_s(view: EngineView) -> float | None:
    if not view.num_waiting and not view.num_held:
        return 0.0
    busy = _busy_share(view)
    if view.queued_prompt_tokens is None or not view.prefill_tok_s or not busy:
        return None
    return view.queued_prompt_tokens * busy / view.prefill_tok_s


def _busy_share(view: EngineView) -> float:
    """Return the share of the window with work."""
    wall_ns = sum(view.device_ns.values())
    return 1.0 - view.device_ns.get("idle_no_work", 0) / wall_ns if wall_ns else 0.0


def _headroom(view: EngineView) -> float | None:
    used = []
    if view.max_running:
        num_present = view.num_running + view.num_waiting + view.num_held
        used.append(num_present / view.max_running)
    if view.blocks_total:
        used.append(view.blocks_used / view.blocks_total)
    tok_s = (view.prefill_tok_s or 0.0) + (view.decode_tok_s or 0.0)
    if view.token_budget and view.step.num and view.window_ns:
        per_step = tok_s * view.window_ns / 1e9 / view.step.num
        used.append(per_step / view.token_budget * _busy_share(view))
    return 1.0 - max(used) if used else None
