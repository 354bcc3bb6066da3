"""Steps as cooperative games, as plainly as their definitions: what every coalition would take.

Nothing but `priced_of` shares code with the split, but for the cost model's tables.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from inferscope.attribution.counterfactual import Delay
from inferscope.attribution.split import Priced, price
from inferscope.cost.model import MAX_TOKENS, StepModel, roofline
from inferscope.cost.peaks import peaks_of
from inferscope.cost.step_table import StepTable
from inferscope.records import Shape

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Cost = Callable[[tuple[int, ...]], float]
"""Function from the members of a coalition to its cost."""

LLAMA_8B = Shape(32, 4096, 32, 8, 128, 14336, 128256, 16, 16, 16)
MIXTRAL = Shape(32, 4096, 32, 8, 128, 14336, 32000, 16, 16, 16, False, 8, 2)
N = np.arange(MAX_TOKENS + 1, dtype=np.float64)


def model_of(f: Floats, g: Floats | None = None, *, single_ns: float = 0.0) -> StepModel:
    return StepModel("test", "fit", f, np.zeros_like(N) if g is None else g, single_ns, 0, 0, 0, 0)


def staircase() -> StepModel:
    """Return a staircase cost, as with padded CUDA graphs."""
    f = 2e5 + 40_000.0 * np.ceil(N / 24)
    f[0] = 0.0
    return model_of(f, 700.0 * N)


def concave() -> StepModel:
    """Every token is cheaper than the one before."""
    f = 3e5 + 9e4 * np.sqrt(N)
    f[0] = 0.0
    return StepModel("test", "fit", f, 500.0 * N, 40.0, 0.0, 8e3, 2.0, 11.0)


def graph_sizes() -> StepModel:
    """As with CUDA graphs of 1 to 512 tokens, by eights, and slower steps beyond."""
    padded_to = np.where(N <= 4, N, 8 * np.ceil(N / 8))
    f = 5e6 + np.maximum(3e6, 2e4 * np.where(N > 512, N, padded_to)) + np.where(N > 512, 4e6, 0.0)
    f[0] = 0.0
    return model_of(f)


def wide_stairs() -> StepModel:
    """Whole blocks of 256 tokens, and nothing else."""
    return model_of(1e6 * np.ceil(N / 256))


def padded() -> StepModel:
    """As of an engine that pads decode attention to the longest context."""
    return replace(concave(), padded_ns=95.0)


def decoding_once() -> StepModel:
    """As of an engine whose decodes' attention is one call, on the host's bill."""
    return replace(padded(), decoding_ns=4e5)


H200 = roofline(LLAMA_8B, peaks_of("NVIDIA H200"))
MODELS = {
    "dense": H200,
    "experts": roofline(MIXTRAL, peaks_of("NVIDIA H200")),
    "staircase": staircase(),
    "concave": concave(),
    "padded": padded(),
    "decoding once": decoding_once(),
    "unknown shape": roofline(None, peaks_of("")),
}
any_model = st.sampled_from(sorted(MODELS)).map(MODELS.__getitem__)


def batch_of(tokens: list[int], contexts: list[int], sampled: list[int]) -> StepTable:
    return StepTable.of(np.array(tokens), np.array(contexts), np.array(sampled))


@st.composite
def batches(
    draw: st.DrawFn, *, chunks: tuple[int, int] = (0, 4), singles: tuple[int, int] = (0, 8)
) -> StepTable:
    num_chunks = draw(st.integers(*chunks))
    num_singles = draw(st.integers(max(singles[0], int(num_chunks == 0)), singles[1]))
    sizes = draw(st.lists(st.integers(2, 2048), min_size=num_chunks, max_size=num_chunks))
    tokens = draw(st.permutations([*sizes, *[1] * num_singles]))
    num = len(tokens)
    contexts = draw(st.lists(st.integers(0, 8000), min_size=num, max_size=num))
    sampled = draw(st.lists(st.integers(0, 1), min_size=num, max_size=num))
    return batch_of(tokens, contexts, sampled)


def table_of(batch: StepTable, prefills: Sequence[int]) -> StepTable:
    """Return a step with some of its members prefilling."""
    return StepTable.of(batch.tokens, batch.context, batch.sampled, prefills)


def priced_of(model: StepModel, batch: StepTable, prefills: Sequence[int] = ()) -> Priced:
    """Price one step by itself."""
    return price(model, table_of(batch, prefills))


# --- what coalitions cost ---------------------------------------------------------------------


def attention_ns(model: StepModel, batch: StepTable, member: int) -> float:
    """Return a request's attention, padding left out."""
    tokens, context = batch.tokens.item(member), batch.context.item(member)
    if tokens == 1:
        return model.single_ns * (context + 1)
    pairs = sum(context + each for each in range(1, tokens + 1))
    return model.chunk_ns + model.pair_ns * pairs + model.context_ns * (context + tokens)


def step_ns(model: StepModel, batch: StepTable, members: tuple[int, ...]) -> float:
    """Return T of these members alone."""
    tokens = sum(batch.tokens.item(m) for m in members)
    rows = sum(batch.sampled.item(m) for m in members)
    singles = [batch.context.item(m) + 1 for m in members if batch.tokens[m] == 1]
    return (
        model.f(tokens)
        + model.g(rows)
        + sum(attention_ns(model, batch, m) for m in members)
        + model.padded_ns * len(singles) * max(singles, default=0)
        + model.decoding_ns * bool(singles)
    )


def co_batched_ns(delay: Delay) -> Ints:
    """Return what each member waits for the others of its class."""
    class_ns = np.full(len(delay.own_ns), delay.decode_class_ns)
    class_ns[delay.prefills] = delay.prefill_class_ns
    again = 0 if delay.recompute_ns is None else delay.recompute_ns
    co_batched: Ints = class_ns - delay.own_ns - again
    return co_batched


# --- values -----------------------------------------------------------------------------------


def subsets(members: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [
        chosen for num in range(len(members) + 1) for chosen in itertools.combinations(members, num)
    ]


def shapley(cost: Cost, num: int) -> Floats:
    """Return the Shapley value from its definition, over all subsets."""
    everybody = tuple(range(num))
    value = {coalition: cost(coalition) for coalition in subsets(everybody)}
    parts = np.zeros(num)
    for coalition, before in value.items():
        weight = 1 / (num * math.comb(num - 1, len(coalition))) if len(coalition) < num else 0.0
        for member in set(everybody) - set(coalition):
            parts[member] += weight * (value[tuple(sorted((*coalition, member)))] - before)
    return parts


def split_by_counts(f: Floats, chunks: list[int], num_single: int) -> tuple[Floats, float]:
    """Return the Shapley value of f(tokens) for chunks and for each single, over counts and sums.

    Args:
        f: by tokens, at least as long as all tokens together.
        chunks: tokens of each.
        num_single: requests with one token.
    """
    by_size = {
        size: _mean_added(f, size, _without(chunks, size), num_single) for size in set(chunks)
    }
    single = _mean_added(f, 1, chunks, num_single - 1) if num_single else 0.0
    return np.array([by_size[size] for size in chunks]), single


def _without(chunks: list[int], size: int) -> list[int]:
    others = list(chunks)
    others.remove(size)
    return others


def _mean_added(f: Floats, size: int, others: list[int], singles: int) -> float:
    """Return the mean of what one adds in a random order of itself, other chunks and singles."""
    tokens, players = sum(others), len(others) + singles
    ways = np.zeros((len(others) + 1, tokens + 1))  # sets of the others, by how many and their sum
    ways[0, 0] = 1.0
    for other in others:
        ways[1:, other:] += ways[:-1, : tokens + 1 - other].copy()
    added = f[size : size + tokens + singles + 1] - f[: tokens + singles + 1]
    mean = 0.0
    for chunks in range(len(others) + 1):
        chances = [
            math.comb(singles, k) / ((players + 1) * math.comb(players, chunks + k))
            for k in range(singles + 1)
        ]
        mean += float(ways[chunks] @ np.convolve(added, chances[::-1], mode="valid"))
    return mean


def owen(cost: Cost, unions: list[tuple[int, ...]]) -> Floats:
    """Return the Owen value from its definition: over sets of other unions, and within the own."""
    parts = np.zeros(sum(map(len, unions)))
    value: dict[frozenset[int], float] = {}

    def kept(*members: int) -> float:
        coalition = frozenset(members)
        if coalition not in value:
            value[coalition] = cost(members)
        return value[coalition]

    for union in unions:
        others = [other for other in unions if other is not union]
        for chosen in subsets(tuple(range(len(others)))):
            whole = tuple(member for at in chosen for member in others[at])
            weight = 1 / (len(unions) * math.comb(len(unions) - 1, len(chosen)))
            for member in union:
                rest = tuple(other for other in union if other != member)
                for inside in subsets(rest):
                    here = weight / (len(union) * math.comb(len(rest), len(inside)))
                    before = (*whole, *inside)
                    parts[member] += here * (kept(*before, member) - kept(*before))
    return parts


def owen_by_orders(cost: Cost, unions: list[tuple[int, ...]]) -> Floats:
    """Return it once more: marginal costs over all orders in which unions stay together."""
    parts, num_orders = np.zeros(sum(map(len, unions))), 0
    for of_unions in itertools.permutations(unions):
        for orders in itertools.product(*(itertools.permutations(union) for union in of_unions)):
            order = tuple(itertools.chain.from_iterable(orders))
            num_orders += 1
            for at, member in enumerate(order):
                parts[member] += cost(order[: at + 1]) - cost(order[:at])
    return parts / num_orders
