from __future__ import annotations

from inferscope.engine import EngineOptions
from inferscope.engine.attention import KvTensors, PagedAttention
from inferscope.engine.load import load_model
from inferscope.engine.runner import Runner
from inferscope.engine.scheduler import Scheduler
from tests.engine.steps import WIDTH, commit, make_request, make_scheduler

MODEL = load_model("random:tiny", EngineOptions(dtype="float32"))


def make_runner(scheduler: Scheduler) -> Runner:
    num_blocks = scheduler.pool.num_blocks
    attention = PagedAttention(
        KvTensors(
            MODEL.config,
            num_blocks=num_blocks,
            block_tokens=WIDTH,
            dtype=MODEL.dtype,
            device=MODEL.device,
        )
    )
    return Runner(
        MODEL,
        attention,
        token_budget=32,
        max_running=4,
        max_blocks=num_blocks,
        block_tokens=WIDTH,
    )


def test_batch_lays_single_tokens_before_chunks() -> None:
    scheduler = make_scheduler(token_budget=8)
    runner = make_runner(scheduler)
    scheduler.enqueue(make_request(0, [10, 11, 12, 13, 14, 15, 16, 17, 18]))
    plan = scheduler.schedule()
    runner.prepare(plan)
    commit(scheduler, plan)
    scheduler.enqueue(make_request(1, [20, 21, 22]))
    scheduler.enqueue(make_request(2, [30]))
    plan = scheduler.schedule()
    batch = runner.prepare(plan)

    assert batch.ids.tolist() == [18, 30, 20, 21, 22]
    assert batch.positions.tolist() == [8, 0, 0, 1, 2]
    assert batch.rows.tolist() == [0, 1, 4]
    assert [part.request.index for part in batch.sampled] == [0, 2, 1]
    assert batch.ragged.num_singles == 2
    expected_slots = [
        request.blocks[position // WIDTH] * WIDTH + position % WIDTH
        for request, position in zip(
            [plan.slices[idx].request for idx in (0, 2, 1, 1, 1)], [8, 0, 0, 1, 2], strict=True
        )
    ]
    assert batch.ragged.slots.tolist() == expected_slots


def test_reused_sequence_slot_reads_its_own_blocks() -> None:
    scheduler = make_scheduler(max_running=1, prefix_cache=False)
    runner = make_runner(scheduler)
    first, second = make_request(0, [1] * 9, max_tokens=1), make_request(1, [2] * 5)
    for request in (first, second):
        scheduler.enqueue(request)
    plan = scheduler.schedule()
    runner.prepare(plan)
    commit(scheduler, plan)
    scheduler.pool.allocate(1)
    batch = runner.prepare(scheduler.schedule())
    assert batch.ragged.blocks.tolist() == [second.blocks]


def test_step_without_a_last_token_samples_nothing() -> None:
    scheduler = make_scheduler(token_budget=4)
    runner = make_runner(scheduler)
    scheduler.enqueue(make_request(0, [1] * 9))
    assert runner.execute(runner.prepare(scheduler.schedule())).tolist() == []


def test_sizes_within_one_power_of_two_are_cold_once() -> None:
    scheduler = make_scheduler(prefix_cache=False)
    runner = make_runner(scheduler)
    is_cold = []
    for index, num_prompt in enumerate((5, 8, 9, 1)):
        request = make_request(index, [index] * num_prompt, max_tokens=1)
        scheduler.enqueue(request)
        plan = scheduler.schedule()
        is_cold.append(runner.prepare(plan).is_cold)
        commit(scheduler, plan)
    assert is_cold == [True, False, True, True]
