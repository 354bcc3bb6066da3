from __future__ import annotations

from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest

from inferscope.adapters.sglang.info import (
    Place,
    adapter_names,
    free_and_cached,
    graph_sizes,
    place,
    place_in,
    step_timer,
)
from inferscope.probe.timers import HostTimer


def places(*, tp: int, pp: int, dp: int, attention_dp: int, attention_cp: int) -> list[Place]:
    """Return all places of an engine, as SGLang derives each process's ranks."""
    found = []
    for dp_rank, pp_rank, tp_rank in product(range(dp), range(pp), range(tp)):
        attention_tp = tp // attention_dp // attention_cp
        rest, attention_tp_rank = divmod(tp_rank, attention_tp)
        parallel = SimpleNamespace(
            tp_size=tp, pp_size=pp, dp_size=dp, ep_size=1, attn_dp_size=attention_dp,
            tp_rank=tp_rank, pp_rank=pp_rank, dp_rank=dp_rank if dp > 1 else None, moe_ep_rank=0,
            attn_tp_rank=attention_tp_rank, attn_cp_rank=rest % attention_cp,
        )  # fmt: skip
        found.append(place_in(parallel))
    return found


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("pp", [1, 3])
@pytest.mark.parametrize(
    ("tp", "attention_dp", "attention_cp"), [(1, 1, 1), (4, 1, 1), (8, 2, 1), (8, 4, 2), (4, 4, 1)]
)
def test_every_scheduler_has_a_rank_of_its_own_and_every_replica_one_core(
    dp: int, pp: int, tp: int, attention_dp: int, attention_cp: int
) -> None:
    found = places(tp=tp, pp=pp, dp=dp, attention_dp=attention_dp, attention_cp=attention_cp)
    assert sorted(one.world_rank for one in found) == list(range(dp * pp * tp))
    cores = Counter(one.ranks[2] for one in found if one.is_core)
    assert cores == dict.fromkeys(range(dp * attention_dp), 1)
    for one in found:
        assert all(rank < size for rank, size in zip(one.ranks, one.sizes, strict=True))
        assert one.sizes[0] * one.sizes[1] * one.sizes[2] == len(found)


@pytest.mark.parametrize(("dp", "attention_dp"), [(1, 1), (2, 1), (1, 2)])
def test_a_scheduler_before_0_5_21_stands_where_a_later_one_does(
    dp: int, attention_dp: int
) -> None:
    found = []
    for dp_rank, tp_rank in product(range(dp), range(4)):
        attention_rank, attention_tp_rank = divmod(tp_rank, 4 // attention_dp)
        counted = dp_rank if dp > 1 else attention_rank if attention_dp > 1 else None
        state = SimpleNamespace(
            tp_size=4, pp_size=1, dp_size=dp * attention_dp, moe_ep_size=1,
            attn_dp_size=attention_dp, tp_rank=tp_rank, pp_rank=0, dp_rank=counted, moe_ep_rank=0,
            attn_tp_rank=attention_tp_rank, attn_cp_rank=0,
        )  # fmt: skip
        found.append(place(SimpleNamespace(ps=state)))
    assert found == places(dp=dp, pp=1, tp=4, attention_dp=attention_dp, attention_cp=1)


def test_steps_are_timed_where_something_can_time_them() -> None:
    assert isinstance(step_timer(SimpleNamespace(device="cpu")), HostTimer)
    assert step_timer(SimpleNamespace(device="npu")) is None


def test_an_adapter_goes_by_its_name_while_it_is_loaded_and_by_its_id_else() -> None:
    manager = SimpleNamespace(lora_refs={})
    runner = SimpleNamespace(lora_manager=None)
    name = adapter_names(SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner)))
    assert name("1f") == "1f"
    runner.lora_manager = manager
    assert name("1f") == "1f"
    manager.lora_refs["1f"] = SimpleNamespace(lora_name="sql")
    assert (name("1f"), name("2a")) == ("sql", "2a")
    bare = SimpleNamespace(tp_worker=SimpleNamespace())
    assert adapter_names(bare)("1f") == "1f"


@pytest.mark.parametrize(
    ("worker", "sizes"),
    [
        (SimpleNamespace(get_decode_cuda_graph_bs=lambda: (1, 2)), [1, 2]),
        (SimpleNamespace(model_runner=SimpleNamespace(decode_cuda_graph_runner=None)), []),
        (SimpleNamespace(model_runner=SimpleNamespace()), []),
        (
            SimpleNamespace(
                model_runner=SimpleNamespace(
                    decode_cuda_graph_runner=SimpleNamespace(capture_bs=[1, 4])
                )
            ),
            [1, 4],
        ),
    ],
    ids=["by-method", "nothing-captured", "no-graphs", "by-what-captured"],
)
def test_sizes_of_graphs_are_read_in_each_version(worker: object, sizes: list[int]) -> None:
    assert graph_sizes(SimpleNamespace(tp_worker=worker)) == sizes


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_the_pool_is_read_where_full_attention_keeps_its_tokens(is_hybrid: bool) -> None:
    allocator = SimpleNamespace(available_size=lambda: 1, full_available_size=lambda: 2)
    cache = SimpleNamespace(evictable_size=lambda: 3, full_evictable_size=lambda: 4)
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=allocator, tree_cache=cache, is_hybrid_swa=is_hybrid
    )
    assert free_and_cached(scheduler)() == ((2, 4) if is_hybrid else (1, 3))
