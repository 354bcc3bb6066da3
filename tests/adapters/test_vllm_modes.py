"""A step's mode and padding follow from what was captured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from inferscope.adapters.vllm.modes import Modes, modes_of

BOTH = Modes("graph", "piecewise", (1, 2, 4, 8))


@pytest.mark.parametrize(
    ("modes", "tokens", "wanted"),
    [
        (BOTH, [1, 1, 1], ("graph", 4)),
        (BOTH, [1, 1, 5], ("piecewise", 8)),
        (BOTH, [1] * 8, ("graph", 8)),
        (BOTH, [1] * 9, ("eager", 0)),
        (Modes("graph", "eager", (4,)), [3], ("eager", 0)),
        (Modes("graph", "eager", (4,), 3), [3], ("graph", 4)),
        (Modes(), [1], ("eager", 0)),
    ],
)
def test_a_step_runs_in_the_smallest_graph_that_holds_it(
    modes: Modes, tokens: list[int], wanted: tuple[str, int]
) -> None:
    assert modes.of(tokens) == wanted


def config(decode: str, mixed: str, sizes: list[int] | None) -> SimpleNamespace:
    mode = SimpleNamespace(
        decode_mode=lambda: SimpleNamespace(name=decode),
        mixed_mode=lambda: SimpleNamespace(name=mixed),
    )
    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode, cudagraph_capture_sizes=sizes),
        num_speculative_tokens=0,
    )


def test_modes_are_read_from_the_configuration() -> None:
    assert modes_of(config("FULL", "PIECEWISE", [4, 1])) == Modes("graph", "piecewise", (1, 4))
    assert modes_of(config("NONE", "NONE", None)) == Modes()
    assert modes_of(SimpleNamespace()) == Modes()
