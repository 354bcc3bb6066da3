from __future__ import annotations

from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest

from inferscope.adapters.sglang_info import (
    Place,
    adapter_names,
    free_and_cached,
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
    assert sorted(place.world_rank for place in found) == list(range(dp * pp * tp))
    cores = Counter(place.ranks[2] for place in found if place.is_core)
    assert cores == dict.fromkeys(range(dp * attention_dp), 1)
    for place in found:
        assert all(rank < size for rank, size in zip(place.ranks, place.sizes, strict=True))
        assert place.sizes[0] * place.sizes[1] * place.sizes[2] == len(found)


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


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_the_pool_is_read_where_full_attention_keeps_its_tokens(is_hybrid: bool) -> None:
    allocator = SimpleNamespace(available_size=lambda: 1, full_available_size=lambda: 2)
    cache = SimpleNamespace(evictable_size=lambda: 3, full_evictable_size=lambda: 4)
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=allocator, tree_cache=cache, is_hybrid_swa=is_hybrid
    )
    assert free_and_cached(scheduler)() == ((2, 4) if is_hybrid else (1, 3))
