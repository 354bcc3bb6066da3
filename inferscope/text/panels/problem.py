"""The sentence above the footer: the largest current problem with its evidence, if any."""

from __future__ import annotations

from inferscope.fold import EngineView
from inferscope.text.labels import CAUSE_MEANINGS, more_or_less, view_verdict
from inferscope.text.panels.kv import kv_share
from inferscope.text.plots import count, duration, share

_LARGE_SHARE = 0.10
"""Minimum share of latency or of device time for a problem to be reported."""


def largest_problem(view: EngineView) -> str:
    """Return the largest current problem with its evidence; empty without one.

    In order of severity: a silent engine, work lost to preemption, requests that wait for a named
    resource, then avoidable latency and device time.
    """
    for rule in (_silent, _unobserved, _preempted, _waiting, _latency, _host_gap, _found, _model):
        sentence = rule(view)
        if sentence:
            return sentence
    return ""


def _silent(view: EngineView) -> str:
    if view.health.probe_state == "lost" or not (view.is_alive or view.has_ended):
        return f"{view.engine or 'The engine'} stopped reporting; showing its last known state."
    return ""


def _unobserved(view: EngineView) -> str:
    if not view.ledger_missing:
        return ""
    reasons = f" ({'; '.join(view.health.unsupported)})" if view.health.unsupported else ""
    return f"Requests have no ledger: {view.ledger_missing}{reasons}."


def _preempted(view: EngineView) -> str:
    lost_ns = view.ledger_ns.get("preempted", 0) + view.ledger_ns.get("recompute", 0)
    whole_ns = sum(view.ledger_ns.values())
    part = lost_ns / whole_ns if whole_ns else 0.0
    if view.num_held:
        noun = "request is" if view.num_held == 1 else "requests are"
        times = "preemption" if view.num_preemptions == 1 else "preemptions"
        return (
            f"{view.num_held} {noun} preempted and waiting for KV blocks"
            f" (KV {share(kv_share(view))} used, {count(view.num_preemptions)} {times} so far)."
        )
    if part > _LARGE_SHARE / 2:
        return f"{share(part)} of latency is preemption: KV blocks ran out and work was recomputed."
    return ""


def _waiting(view: EngineView) -> str:
    if not view.num_waiting or view.binding in ("", "none"):
        return ""
    noun = "request waits" if view.num_waiting == 1 else "requests wait"
    waits = [row.age_ns for row in view.requests if row.state == "waiting"]
    oldest = f", oldest {duration(max(waits))}" if waits else ""
    match view.binding:
        case "blocks":
            cause = f"for KV blocks: {share(kv_share(view))} of them are used"
        case "slots":
            cause = f"for a slot: {view.num_running} of {view.max_running or '-'} are taken"
        case "budget":
            cause = f"for the token budget of a step ({count(view.token_budget or None)} tokens)"
        case other:
            cause = f"for {other}"
    return f"{view.num_waiting} {noun} {cause}{oldest}."


def _latency(view: EngineView) -> str:
    whole_ns = sum(view.ledger_ns.values())
    if not whole_ns:
        return ""
    spent = view.ledger_ns
    unwanted = {
        "interference": spent.get("decode_interference", 0) + spent.get("prefill_interference", 0),
        **{
            cause: spent.get(cause, 0)
            for cause in ("queue", "cpu_gap", "rank_wait", "slowdown", "cold_start")
        },
    }
    cause, cause_ns = max(unwanted.items(), key=lambda item: item[1])
    part = cause_ns / whole_ns
    if part < _LARGE_SHARE:
        return ""
    if cause == "interference":
        mixed = f" ({share(view.mixed_share)} of steps held both)" if view.mixed_share else ""
        return f"{share(part)} of latency is interference between prefill and decode{mixed}."
    if cause == "queue":
        p95 = duration(view.queue.p95_ns)
        return f"{share(part)} of latency is queue: requests wait for admission (p95 {p95})."
    titles = [found.title for found in view.findings if cause in found.causes]
    return f"{share(part)} of latency is {cause}: {(*titles, CAUSE_MEANINGS[cause])[0]}."


def _host_gap(view: EngineView) -> str:
    whole_ns = sum(view.device_ns.values())
    part = view.device_ns.get("idle_host_gap", 0) / whole_ns if whole_ns else 0.0
    if part < _LARGE_SHARE:
        return ""
    gap = duration(view.host_gap.p50_ns)
    return f"The device is idle {share(part)} of the time while requests run (host gap p50 {gap})."


def _found(view: EngineView) -> str:
    """Return the first finding of the whole run, if the window shows no problem."""
    for found in view.findings:
        if found.severity != "low":
            return f"Over the whole run: {found.title} (inferscope findings)."
    return ""


def _model(view: EngineView) -> str:
    verdict = view_verdict(view)
    if not verdict or view.model_residual is None:
        return ""
    took = more_or_less(view.model_residual)
    return f"The last steps took {took} than modelled ({view.model_source}): {verdict}."
