"""What passes between vLLM's servers: how many bytes, and of which requests it came."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from inferscope.adapters.vllm.transfers import Group, Transfers, groups_of, num_bytes


def test_a_block_is_sent_whole() -> None:
    assert num_bytes(33, [Group(16, 100), Group(32, 1000)]) == 3 * 100 + 2 * 1000


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(20, 2), (144, 9), (8000, 9)])
def test_of_layers_with_a_window_no_more_than_it_is_sent(num_tokens: int, num_blocks: int) -> None:
    layers = SimpleNamespace(block_size=16, page_size_bytes=50, sliding_window=128)
    scheduler = SimpleNamespace(
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=layers, layer_names=["a", "b"])]
        ),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(world_size=2)),
    )
    assert num_bytes(num_tokens, groups_of(scheduler)) == num_blocks * 50 * 2 * 2


class Core:
    """Recorder of transfers."""

    def __init__(self, *names: str) -> None:
        self.waiting = {
            name: SimpleNamespace(index=at, coming=(1, 7, "there")) for at, name in enumerate(names)
        }
        self.came: list[int] = []
        self.probe = self
        self.scheduler = SimpleNamespace()

    def progress_of(self, request_id: str) -> Any:
        return self.waiting.get(request_id)

    def transferred(self, index: int, _size_bytes: int, **_told: object) -> None:
        self.came.append(index)


def test_a_transfer_that_failed_on_one_rank_steps_before_is_not_recorded() -> None:
    core = Core("good", "bad")
    core.scheduler.failed_recving_kv_req_ids = {"bad"}
    transfers = Transfers()
    transfers.core = core  # type: ignore[assignment]
    done = {"good", "bad", "unknown"}
    transfers.came(None, SimpleNamespace(finished_recving=done, invalid_block_ids=set()))
    assert core.came == [0]
    assert core.waiting["bad"].coming is None


def test_if_the_scheduler_keeps_no_failures_a_step_with_one_records_no_transfer() -> None:
    core = Core("one")
    transfers = Transfers()
    transfers.core = core  # type: ignore[assignment]
    transfers.came(None, SimpleNamespace(finished_recving={"one"}, invalid_block_ids={3}))
    assert not core.came
