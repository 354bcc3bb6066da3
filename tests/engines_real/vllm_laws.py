"""What must hold of an export of a vLLM server, against its clients' account."""

from __future__ import annotations

import collections
import re
from typing import Any

from tests.engines_real.clients import Ask
from tests.engines_real.vllm_server import Server

Lines = list[dict[str, Any]]


def of_kind(lines: Lines, kind: str) -> Lines:
    """Return the lines of a kind."""
    return [line for line in lines if line["kind"] == kind]


def hold_to_the_laws(
    lines: Lines, asks: list[Ask], *, was_core_killed: bool = False
) -> dict[str, Any]:
    """Hold an export against the clients' account; return what was seen, for the test to demand.

    A core that is killed while a worker executes never tells who was in that step: that one, and
    no other, may be unjoined.

    Σ tokens of a request's slices = prompt - cached + outputs - 1 + recomputed, exactly.
    """
    (run,) = of_kind(lines, "run")
    assert (run["lost"], run["late"]) == (0, 0)
    assert run["unjoined"] <= was_core_killed
    computed: collections.Counter[str] = collections.Counter()
    guessed: collections.Counter[str] = collections.Counter()
    again: collections.Counter[str] = collections.Counter()
    num_mixed = 0
    for step in of_kind(lines, "step"):
        shares = step["shares"]
        spent = sum(share["ns"] for share in shares)
        assert spent + step["padding_ns"] + step["unattributed_ns"] == step["measured_ns"]
        assert all(share["ns"] >= 0 for share in shares)
        num_mixed += len({share["phase"] == "prefill" for share in shares}) > 1
        for share in shares:
            computed[share["request"]] += share["tokens"]
            again[share["request"]] += share["tokens"] * share["recomputed"]
            guessed[share["request"]] += share["tokens"] * (share["phase"] == "verify")
    by_name = collections.defaultdict(list)
    for request in of_kind(lines, "request"):
        by_name[request["external_id"]].append(request)
        ledger = request["ledger_ns"]
        assert sum(ledger.values()) == request["delivered_ns"] - request["arrived_ns"]
        assert all(ns > 0 for ns in ledger.values())
        assert not request["joined_late"]
    for ask in asks:
        final = by_name.pop(ask.name)
        if not ask.is_whole:
            continue
        assert len(final) == ask.body.get("n", 1)
        assert {request["prompt_tokens"] for request in final} == {ask.usage["prompt_tokens"]}
        outputs = sum(request["output_tokens"] for request in final)
        assert outputs == ask.usage["completion_tokens"]
        for request in final:
            assert request["arrived_at"] == request["delivered_at"] == "http"
            due = request["prompt_tokens"] - request["cached_tokens"] + request["output_tokens"] - 1
            spent = computed[request["request"]] - again[request["request"]]
            if "stop" in ask.body:  # found by the front end, while the core goes on
                assert request["finish"] == "stop"
                assert spent >= due
                continue
            assert request["finish"] == "length"
            # Draft tokens that were rejected, or came after the last, are computed in vain.
            assert due <= spent <= due + guessed[request["request"]]
        details = ask.usage.get("prompt_tokens_details") or {}
        if len(final) == 1 and "cached_tokens" in details:
            assert final[0]["cached_tokens"] == details["cached_tokens"]
    assert not by_name  # health probes, and the like, are no requests
    return {
        "steps": len(of_kind(lines, "step")),
        "mixed": num_mixed,
        "recomputed": sum(again.values()),
        "guessed": sum(guessed.values()),
        "cached": sum(request["cached_tokens"] for request in of_kind(lines, "request")),
        "finishes": collections.Counter(r["finish"] for r in of_kind(lines, "request")),
        "probe_cost_ns": run["probe_cost_ns"],
    }


def agreement(lines: Lines, asks: list[Ask]) -> dict[str, list[float]]:
    """Return how much later the clients saw first and last bytes than we, in ms, sorted."""
    by_name = {request["external_id"]: request for request in of_kind(lines, "request")}
    apart: dict[str, list[float]] = {"ttft": [], "e2e": []}
    for ask in asks:
        if ask.is_whole and ask.body.get("n", 1) == 1:
            request = by_name[ask.name]
            ours = request["first_token_ns"] - request["arrived_ns"]
            apart["ttft"].append((ask.first_ns - ask.sent_ns - ours) / 1e6)
            ours = request["delivered_ns"] - request["arrived_ns"]
            apart["e2e"].append((ask.ended_ns - ask.sent_ns - ours) / 1e6)
    return {name: sorted(values) for name, values in apart.items()}


def metric(server: Server, name: str) -> float:
    """Return the sum of a metric over its labels."""
    return sum(
        float(number)
        for number in re.findall(rf"^{name}(?:_total)?{{.*}} (\S+)$", server.get("/metrics"), re.M)
    )


def report(name: str, seen: dict[str, Any], apart: dict[str, list[float]]) -> None:
    """Print what was seen."""
    spread = {
        key: f"p50 {values[len(values) // 2]:.2f} max {values[-1]:.2f} min {values[0]:.2f} ms"
        for key, values in apart.items()
    }
    print(f"\n{name}: {seen} client - ours: {spread}")  # noqa: T201
