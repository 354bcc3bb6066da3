"""The devices' time is given out once: to tenants, to waste, to idleness."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inferscope_prometheus.cost_allocation import CostAllocation
from inferscope_prometheus.tenants import IDLE, KEPT_NS, UNNAMED, UNUSED_AFTER, WASTE, Tenants
from msgspec.structs import replace

from inferscope.fold.final_records import FinalRequest, TokenTime
from tests.exporters.otlp.conftest import Finals

FINISHES = ("stop", "length", "client_cancel", "timeout", "error", "engine_lost")
nanoseconds = st.integers(0, 10**9)


@st.composite
def amounts(draw: st.DrawFn) -> tuple[int, int, int, int, str, str]:
    """Draw prefill, decode, and of each what was in vain; how it ended; whose it was."""
    prefill_ns, decode_ns = draw(nanoseconds), draw(nanoseconds)
    return (
        prefill_ns,
        decode_ns,
        draw(st.integers(0, prefill_ns)),
        draw(st.integers(0, decode_ns)),
        draw(st.sampled_from(FINISHES)),
        draw(st.sampled_from("abc")),
    )


def made(like: FinalRequest, of: tuple[int, int, int, int, str, str]) -> FinalRequest:
    prefill_ns, decode_ns, again_ns, rejected_ns, finish, tenant = of
    return replace(
        like,
        prefill_ns=prefill_ns,
        decode_ns=decode_ns,
        recomputed=TokenTime(1, again_ns),
        rejected=TokenTime(1, rejected_ns),
        finish=finish,
        attributes={"tenant": tenant},
    )


@pytest.mark.thorough
@given(st.data())
def test_all_of_it_is_given_out_once_all_have_ended(finals: Finals, data: st.DataObject) -> None:
    requests = [made(finals.requests[0], of) for of in data.draw(st.lists(amounts(), max_size=12))]
    bill = CostAllocation(Tenants("ab", most=2))
    device = {"prefill": 0, "decode": 0, "padding": 7, "idle_no_work": 11}
    wasted_ns = 0
    in_flight: list[FinalRequest] = []
    for request in requests:
        bill.attributed(request.prefill_ns, request.decode_ns)
        device["prefill"] += request.prefill_ns
        device["decode"] += request.decode_ns
        in_flight.append(request)
        while in_flight and data.draw(st.booleans()):
            wasted_ns += sum(bill.ended(in_flight.pop()).values())
        bill.settle(device)
        in_flight_ns = sum(each.prefill_ns + each.decode_ns for each in in_flight)
        given_ns = sum(bill.device_ns.values())
        assert given_ns <= sum(device.values()) - in_flight_ns + len(requests)
    for request in in_flight:
        wasted_ns += sum(bill.ended(request).values())
    bill.settle(device)
    by_phase = {
        phase: sum(ns for (_, of), ns in bill.device_ns.items() if of == phase) for phase in device
    }
    for phase, ns in device.items():
        assert ns - 2 * len(requests) - 2 <= by_phase[phase] <= ns
    assert bill.device_ns[IDLE, "idle_no_work"] == 11
    assert bill.device_ns[WASTE, "padding"] == 7
    lost_ns = bill.device_ns[WASTE, "prefill"] + bill.device_ns[WASTE, "decode"]
    assert wasted_ns - 2 * len(requests) - 2 <= lost_ns <= wasted_ns


@pytest.mark.thorough
@given(st.lists(amounts(), min_size=1, max_size=8), st.floats(0.1, 1.0))
def test_where_steps_overlap_all_are_given_alike_less(
    finals: Finals, of_all: list[tuple[int, int, int, int, str, str]], part: float
) -> None:
    """Their own lengths sum to more than the device worked."""
    requests = [made(finals.requests[0], of) for of in of_all]
    bill = CostAllocation(Tenants("abc", most=3))
    for request in requests:
        bill.attributed(request.prefill_ns, request.decode_ns)
        bill.ended(request)
    device = {
        "prefill": int(part * sum(request.prefill_ns for request in requests)),
        "decode": int(part * sum(request.decode_ns for request in requests)),
    }
    bill.settle(device)
    assert sum(bill.device_ns.values()) <= sum(device.values())
    assert sum(bill.device_ns.values()) >= sum(device.values()) - 2 * 4 * len(requests)


def test_time_of_requests_in_flight_is_not_allocated_to_ended_ones(finals: Finals) -> None:
    request = made(finals.requests[0], (300, 100, 0, 0, "stop", "a"))
    bill = CostAllocation(Tenants("a", most=1))
    bill.attributed(300, 100)
    bill.attributed(600, 100)  # of another, in flight
    bill.ended(request)
    bill.settle({"prefill": 900, "decode": 200})
    assert bill.device_ns["a", "prefill"] == 300
    assert bill.device_ns["a", "decode"] == 100
    bill.settle({"prefill": 900, "decode": 200})
    assert bill.device_ns["a", "prefill"] == 300


def test_a_payer_without_a_series_keeps_what_it_paid_from_the_others(finals: Finals) -> None:
    tenants = Tenants(most=4)
    bill = CostAllocation(tenants, price=1.0)
    of_a = made(replace(finals.requests[0], delivered_ns=0), (300, 100, 0, 0, "stop", "a"))
    for _ in range(4):
        bill.attributed(300, 100)
        bill.ended(of_a)
    bill.settle({"prefill": 1200, "decode": 400})
    assert bill.device_ns["a", "prefill"] == 600
    later = replace(of_a, delivered_ns=KEPT_NS)
    for number in range(UNUSED_AFTER):
        bill.attributed(300, 100)
        bill.ended(replace(later, attributes={"tenant": f"b{number}"}))
    device = {"prefill": 300 * (UNUSED_AFTER + 4), "decode": 100 * (UNUSED_AFTER + 4)}
    bill.settle(device)
    assert not any(payer == "a" for payer, _ in (*bill.device_ns, *bill.tokens))
    assert sum(bill.device_ns.values()) == sum(device.values()) - 2 * 400
    assert (bill.dollars() or {}).keys() == bill.device_ns.keys()
    bill.settle(device)
    assert sum(bill.device_ns.values()) == sum(device.values()) - 2 * 400, "the others have no more"
    for _ in range(3):
        bill.attributed(300, 100)
        bill.ended(later)
    bill.settle({"prefill": device["prefill"] + 900, "decode": device["decode"] + 300})
    assert bill.device_ns["a", "prefill"] == 300, "from 0 on, the third one"


def test_waste_has_one_reason(finals: Finals) -> None:
    like = finals.requests[0]

    def waste(finish: str) -> dict[str, int]:
        return CostAllocation(Tenants(most=0)).ended(made(like, (100, 50, 30, 20, finish, "a")))

    assert waste("stop") == {"recompute": 30, "rejected_draft": 20}
    assert waste("client_cancel") == {"recompute": 30, "rejected_draft": 20, "cancel": 100}
    assert waste("engine_lost") == {"recompute": 30, "rejected_draft": 20, "retry": 100}


def test_a_request_of_which_a_part_was_missed_is_billed_and_its_tokens_are_not_counted(
    finals: Finals,
) -> None:
    bill = CostAllocation(Tenants(most=0))
    bill.attributed(10, 10)
    late = replace(finals.requests[0], joined_late=True, prefill_ns=10, decode_ns=10, attributes={})
    bill.ended(late)
    bill.settle({"prefill": 10, "decode": 10})
    assert bill.device_ns[UNNAMED, "prefill"] == bill.device_ns[UNNAMED, "decode"] == 10
    assert not any(bill.tokens.values())
