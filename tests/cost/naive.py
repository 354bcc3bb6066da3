"""FLOPs and bytes of a step, counted one by one: the oracle of `cost.flops` and `cost.hbm`.

Shares no code with them: a matrix product is its multiply-adds, a key that a query sees is met one
position at a time, a rank holds its own heads.
"""

from __future__ import annotations

from inferscope.records import Shape

Slice = tuple[int, int, int]


def has_window(shape: Shape, layer: int) -> bool:
    return shape.window_tokens > 0 and layer >= shape.num_full_layers


def keys_seen(shape: Shape, layer: int, position: int) -> set[int]:
    """Return the positions that a query sees in a layer."""
    seen = set(range(position + 1))
    if has_window(shape, layer):
        seen = {key for key in seen if key > position - shape.window_tokens}
    return seen


def heads_of(shape: Shape, num_ranks: int, rank: int) -> tuple[list[int], set[int]]:
    """Return a rank's query heads, and the KV heads that these need."""
    per_rank, per_group = shape.num_heads // num_ranks, shape.num_heads // shape.num_kv_heads
    mine = list(range(rank * per_rank, (rank + 1) * per_rank))
    return mine, {head // per_group for head in mine}


def products(shape: Shape, *, num_ranks: int = 1, rank: int = 0) -> list[tuple[int, int]]:
    """Return the inner and outer sizes of the products that a token meets in one layer."""
    heads, kv_heads = heads_of(shape, num_ranks, rank)
    query = len(heads) * shape.head_dim
    out = [(shape.hidden, query), (query, shape.hidden)]
    out += [(shape.hidden, len(kv_heads) * shape.head_dim) for _ in ("key", "value")]
    ffn = shape.ffn // num_ranks
    expert = [(shape.hidden, ffn), (shape.hidden, ffn), (ffn, shape.hidden)]
    if not shape.num_experts:
        return out + expert
    for _ in range(shape.experts_per_token + shape.num_shared_experts):
        out += expert
    out += [(shape.hidden, 1)] * (shape.num_experts + shape.num_shared_gates)
    return out


def step_flops(shape: Shape, slices: list[Slice], *, num_ranks: int = 1, rank: int = 0) -> int:
    """Return what one rank computes."""
    heads, _ = heads_of(shape, num_ranks, rank)
    flops = 0
    for tokens, context, sampled in slices:
        for layer in range(shape.num_layers):
            for position in range(context, context + tokens):
                flops += sum(
                    2 * inner * outer
                    for inner, outer in products(shape, num_ranks=num_ranks, rank=rank)
                )
                for _ in heads:  # scores, then values
                    flops += 2 * 2 * shape.head_dim * len(keys_seen(shape, layer, position))
        flops += sampled * 2 * shape.hidden * (shape.vocab // num_ranks)
    return flops


def kv_bytes(shape: Shape, slices: list[Slice], *, num_ranks: int = 1) -> tuple[int, int]:
    """Return the bytes of keys and values that all ranks read and write."""
    read = written = 0
    for rank in range(num_ranks):
        _, kv_heads = heads_of(shape, num_ranks, rank)
        each = 2 * len(kv_heads) * shape.head_dim * shape.kv_bits // 8
        for tokens, context, _ in slices:
            for layer in range(shape.num_layers):
                seen: set[int] = set()
                for position in range(context, context + tokens):
                    seen |= keys_seen(shape, layer, position)
                    written += each
                read += each * len(seen)
    return read, written


def dense_weight_bytes(shape: Shape, *, num_rows: int, num_ranks: int = 1) -> int:
    """Return the bytes of the weights that all ranks of a dense model read in a step."""
    num = 0
    for rank in range(num_ranks):
        layer = sum(i * o for i, o in products(shape, num_ranks=num_ranks, rank=rank))
        num += shape.num_layers * layer * shape.weight_bits
        if num_rows:
            head = shape.hidden * shape.vocab // num_ranks
            num += head * (shape.head_bits or shape.weight_bits)
    return num // 8
