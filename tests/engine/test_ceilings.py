from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from inferscope.engine.ceilings import HostStopwatch, best_s, measure_ceilings
from inferscope.engine.config import EngineOptions
from inferscope.engine.devices import device_uuid, find_device, step_timer
from inferscope.engine.load import load_model
from inferscope.engine.steptimes import measure_steps

CPU = torch.device("cpu")


class ScriptedStopwatch:
    """Stopwatch that returns the given durations, one per call."""

    def __init__(self, seconds: list[float]) -> None:
        self.left = seconds
        self.num_calls = 0

    def seconds(self, work: Callable[[], object], num: int) -> float:
        self.num_calls += num
        return num * (self.left.pop(0) if len(self.left) > 1 else self.left[0])


def test_best_batch_is_reported_and_batches_exceed_the_clock_resolution() -> None:
    device = ScriptedStopwatch([1e-3, 1e-3, 4e-3, 5e-4, 9e-3])
    assert best_s(lambda: None, device, budget_s=0.01) == 5e-4
    assert device.num_calls >= 2 + 20, "20 ms at a millisecond each"


@pytest.mark.thorough
def test_rates_of_this_machine_are_plausible() -> None:
    """A copy moves twice the bytes of a read, so neither rate can be ten times the other."""
    ceilings = measure_ceilings(CPU, seconds=0.5)
    assert 1e8 < ceilings.copy_bytes_s < 1e13
    assert 0.1 < ceilings.copy_bytes_s / ceilings.read_bytes_s < 10
    assert 1e8 < ceilings.flops_s["float32"] < 1e15
    assert 1e-8 < ceilings.launch_s < 1e-3


def test_failing_work_has_no_rate() -> None:
    def fail() -> None:
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError):
        best_s(fail, HostStopwatch(), budget_s=0.01)


def test_measured_steps_span_prefills_decodes_and_mixed_batches() -> None:
    options = EngineOptions(
        token_budget=32, max_running=4, num_blocks=64, prefix_cache=False, dtype="float32"
    )
    model = load_model("random:tiny", options)
    times = measure_steps(model, options, seconds=1.0)
    assert all(step.took_ns > 0 for step in times)
    assert all(
        len(step.tokens) == len(step.contexts) == len(step.sampled) <= 4 and sum(step.tokens) <= 32
        for step in times
    )
    decodes = [step for step in times if set(step.tokens) == {1}]
    assert {len(step.tokens) for step in decodes} >= {1, 2, 4}
    assert any(len(step.tokens) == 1 < step.tokens[0] for step in times), "a chunk alone"
    assert any(step.tokens[0] > 1 and step.contexts[0] > 0 for step in times), "behind a context"
    assert any(not any(step.sampled) for step in times), "a chunk that samples nothing"
    assert any(1 in step.tokens and max(step.tokens) > 1 for step in times), "mixed"


def test_auto_device_is_a_gpu_if_present() -> None:
    is_cuda = torch.cuda.is_available()
    device = find_device("auto")
    assert device.type == ("cuda" if is_cuda else "cpu")
    assert (device_uuid(device) != "") == is_cuda
    assert (step_timer(device) is not None) == is_cuda
