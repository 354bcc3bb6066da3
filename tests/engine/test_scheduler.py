from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from inferscope.engine.kv import ROOT, BlockPool, Chain, Match
from inferscope.engine.request import Request
from inferscope.engine.scheduler import Plan, Scheduler
from tests.engine.steps import WIDTH, commit, make_request, make_scheduler


def slice_rows(plan: Plan) -> list[tuple[int, int, int, bool]]:
    return [(p.request.index, p.context, p.num_tokens, p.is_sampled) for p in plan.slices]


def test_long_prompt_runs_in_chunks_beside_decodes() -> None:
    scheduler = make_scheduler(token_budget=8)
    scheduler.enqueue(make_request(0, [1] * 3))
    commit(scheduler, scheduler.schedule())
    scheduler.enqueue(make_request(1, [2] * 10))
    plan = scheduler.schedule()
    assert slice_rows(plan) == [(0, 3, 1, True), (1, 0, 7, False)]
    assert plan.binding == "budget"
    commit(scheduler, plan)
    plan = scheduler.schedule()
    assert slice_rows(plan) == [(0, 4, 1, True), (1, 7, 3, True)]
    assert plan.binding == "none"


def test_slots_bind_when_all_are_taken() -> None:
    scheduler = make_scheduler(max_running=2)
    for index in range(3):
        scheduler.enqueue(make_request(index, [index] * 3))
    plan = scheduler.schedule()
    assert [part.request.index for part in plan.slices] == [0, 1]
    assert plan.binding == "slots"


def test_blocks_bind_when_the_next_prompt_does_not_fit_whole() -> None:
    scheduler = make_scheduler(num_blocks=5, token_budget=4)
    scheduler.enqueue(make_request(0, [1] * 4))
    commit(scheduler, scheduler.schedule())
    scheduler.enqueue(make_request(1, [2] * 16))
    plan = scheduler.schedule()
    assert slice_rows(plan) == [(0, 4, 1, True)]
    assert plan.binding == "blocks"


def test_prefix_hit_starts_behind_the_cached_blocks() -> None:
    scheduler = make_scheduler()
    prompt = list(range(10))
    scheduler.enqueue(make_request(0, prompt, max_tokens=1))
    commit(scheduler, scheduler.schedule())
    scheduler.enqueue(make_request(1, prompt))
    plan = scheduler.schedule()
    assert slice_rows(plan) == [(1, 8, 2, True)]
    assert plan.admitted[0].cached_tokens == 8


def test_fully_cached_prompt_still_computes_a_token() -> None:
    scheduler = make_scheduler()
    prompt = list(range(8))
    for index in range(2):
        scheduler.enqueue(make_request(index, prompt, max_tokens=1))
        plan = scheduler.schedule()
        commit(scheduler, plan)
    assert slice_rows(plan) == [(1, 4, 4, True)]


def test_last_admitted_is_preempted_and_resumes_first() -> None:
    scheduler = make_scheduler(num_blocks=5, prefix_cache=False)
    for index in range(2):
        scheduler.enqueue(make_request(index, [index] * 7, max_tokens=12))
    for _ in range(2):
        plan = scheduler.schedule()
        commit(scheduler, plan)
    assert len(plan.slices) == 2
    plan = scheduler.schedule()
    assert [part.request.index for part in plan.slices] == [0]
    assert [request.index for request in plan.preempted] == [1]
    assert plan.binding == "blocks"
    assert next(iter(scheduler.waiting)).index == 1
    victim = plan.preempted[0]
    while victim.sequence_slot < 0:
        commit(scheduler, plan)
        plan = scheduler.schedule()
    assert plan.slices[-1].request is victim
    assert victim.ever_computed == 8
    commit(scheduler, plan)
    assert victim.recomputed_tokens == 8


def test_waiting_request_can_be_removed() -> None:
    scheduler = make_scheduler(max_running=1)
    requests = [make_request(index, [index] * 3) for index in range(2)]
    for request in requests:
        scheduler.enqueue(request)
    scheduler.schedule()
    for request in reversed(requests):
        scheduler.remove(request)
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.pool.num_used == 0


class CountingPool(BlockPool):
    """A pool that counts its searches for prefixes."""

    num_searches = 0

    def match(self, tokens: Sequence[int], *, max_blocks: int, root: Chain = ROOT) -> Match:
        self.num_searches += 1
        return super().match(tokens, max_blocks=max_blocks, root=root)


def blocked_head() -> tuple[Scheduler, CountingPool, Request]:
    """Return a scheduler whose queue's head shares 8 blocks and waits for more, and its neighbour.

    The neighbour holds the 8 blocks, decodes, and has 5 tokens left.
    """
    pool = CountingPool(12, block_tokens=WIDTH)
    scheduler = Scheduler(pool, token_budget=64, max_running=4, prefix_cache=True)
    prompt = list(range(32))
    neighbour = make_request(0, prompt, max_tokens=6)
    scheduler.enqueue(neighbour)
    commit(scheduler, scheduler.schedule())
    scheduler.enqueue(make_request(1, prompt + [50] * 16))
    return scheduler, pool, neighbour


def test_blocked_head_matches_its_prefix_once() -> None:
    scheduler, pool, _ = blocked_head()
    pool.num_searches = 0
    for _ in range(4):
        plan = scheduler.schedule()
        assert (plan.binding, len(plan.slices)) == ("blocks", 1)
        commit(scheduler, plan)
    assert pool.num_searches == 1


def test_blocked_head_is_matched_anew_when_its_blocks_are_released() -> None:
    scheduler, pool, neighbour = blocked_head()
    commit(scheduler, scheduler.schedule())
    scheduler.remove(neighbour)
    pool.num_searches = 0
    plan = scheduler.schedule()
    assert slice_rows(plan) == [(1, 32, 16, True)]
    assert pool.num_searches == 1


def test_blocked_head_is_matched_anew_when_its_prefix_grows() -> None:
    scheduler, pool, neighbour = blocked_head()
    scheduler.schedule()
    # The neighbour fills and publishes the next block of the head's prefix.
    neighbour.tokens[32:] = [50] * 5
    neighbour.computed = 36
    neighbour.blocks += pool.allocate(1)
    pool.publish(neighbour.blocks[8], chain=neighbour.chain, tokens=(50,) * WIDTH)
    scheduler.remove(neighbour)
    assert slice_rows(scheduler.schedule()) == [(1, 36, 12, True)]


class Compared(Request):
    """A request that counts its comparisons with others."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        Compared.num_compared += 1
        return self is other

    __hash__ = object.__hash__


def compared(request: Request) -> Compared:
    return Compared(**{field.name: getattr(request, field.name) for field in fields(request)})


def test_request_cancelled_at_the_head_is_freed() -> None:
    scheduler, _, _ = blocked_head()
    scheduler.waiting.clear()
    head = compared(make_request(1, [7] * 48))
    scheduler.enqueue(head)
    scheduler.schedule()
    kept = weakref.ref(head)
    scheduler.remove(head)
    del head
    assert kept() is None


@given(place=st.integers(0, 199))
def test_cancelling_costs_the_same_wherever_the_request_waits(place: int) -> None:
    scheduler = make_scheduler()
    queue = [compared(make_request(index, [1])) for index in range(200)]
    for request in queue:
        scheduler.enqueue(request)
    Compared.num_compared = 0
    scheduler.remove(queue.pop(place))
    assert Compared.num_compared <= 1
    assert list(scheduler.waiting) == queue


@given(
    num_blocks=st.integers(8, 20),
    token_budget=st.integers(1, 40),
    max_running=st.integers(1, 5),
    prefix_cache=st.booleans(),
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 12), st.booleans()),
        min_size=1,
        max_size=10,
    ),
)
def test_every_token_is_computed_once_except_recompute(
    num_blocks: int,
    token_budget: int,
    max_running: int,
    prefix_cache: bool,
    arrivals: list[tuple[int, int, int, bool]],
) -> None:
    """Each arrival is a delay in steps, a prompt, and a number of output tokens."""
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        token_budget=token_budget,
        max_running=max_running,
        prefix_cache=prefix_cache,
    )
    requests: list[Request] = []
    computed: list[int] = []
    to_come = list(reversed(arrivals))
    pause = to_come[-1][0]
    for _ in range(2_000):
        while to_come and pause == 0:
            _, num_prompt, max_tokens, is_alike = to_come.pop()
            prompt = [7] * num_prompt if is_alike else [len(requests)] * num_prompt
            request = make_request(len(requests), prompt, max_tokens=max_tokens)
            requests.append(request)
            computed.append(0)
            scheduler.enqueue(request)
            pause = to_come[-1][0] if to_come else 0
        pause = max(0, pause - 1)
        plan = scheduler.schedule()

        assert plan.num_tokens == sum(part.num_tokens for part in plan.slices) <= token_budget
        assert all(part.num_tokens > 0 for part in plan.slices)
        assert len({part.request.index for part in plan.slices}) == len(plan.slices)
        assert plan.slices or not (scheduler.waiting or scheduler.running)
        assert len({request.sequence_slot for request in scheduler.running}) == len(
            scheduler.running
        )
        assert len(scheduler.running) <= max_running
        for part in plan.slices:
            computed[part.request.index] += part.num_tokens
            num_slots = len(part.request.blocks) * WIDTH
            assert part.context + part.num_tokens <= num_slots
        if scheduler.waiting:
            assert plan.binding != "none"
        commit(scheduler, plan)
        if not (to_come or scheduler.waiting or scheduler.running):
            break

    assert not scheduler.waiting
    assert not scheduler.running
    assert scheduler.pool.num_used == 0
    for request, num_computed in zip(requests, computed, strict=True):
        assert request.num_output == request.max_tokens
        owed = request.num_prompt + request.num_output - 1
        assert num_computed == owed - request.cached_tokens + request.recomputed_tokens
