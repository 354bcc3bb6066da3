"""Recorder of KV blocks that vLLM's core receives from another engine.

    schedule ───────────► connector.update_state_after_alloc    blocks are requested
    update_from_output ─► connector.update_connector_output     all blocks have arrived

Both methods belong to the connector interface. So every connector is observed that makes requests
wait for their blocks, if its router names their origin in `kv_transfer_params`. A connector that
loads within a step causes no wait between the two: its time is the step's, and is not recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns
from typing import Any, NamedTuple

from inferscope.adapters.patching import Patches
from inferscope.adapters.vllm.steps import Core


class Group(NamedTuple):
    """Layers whose blocks are counted together."""

    block_tokens: int
    block_bytes: int
    """Bytes of one block: of all these layers, on all ranks of one replica."""
    most_blocks: int | None = None
    """Maximum number of blocks sent per request: with a sliding window, those that it overlaps."""


class Transfers:
    """Recorder of the blocks that requests wait for, of one core at a time.

    Attributes:
        core: the core that is observed; None where there is none.
        groups: sizes of its blocks.
    """

    def __init__(self) -> None:
        self.core: Core | None = None
        self.groups: Sequence[Group] = ()

    def install(self, patches: Patches, connector: Any) -> None:
        """Hook a scheduler's connector, once for each class of connectors."""
        kind = type(connector)
        patches.around(kind, "update_state_after_alloc", before=self.asked)
        patches.around(kind, "update_connector_output", before=self.came)

    def asked(self, connector: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note blocks that are allocated for a request; vLLM calls again, without tokens."""
        if self.core is None:
            return
        progress = self.core.progress_of(request.request_id)
        peer = peer_of(getattr(request, "kv_transfer_params", None))
        if progress is not None and peer and num_external_tokens:
            progress.coming = (monotonic_ns(), num_bytes(num_external_tokens, self.groups), peer)

    def came(self, connector: Any, connector_output: Any) -> None:
        """Record the transfers that are complete; drop those that failed."""
        core, done = self.core, connector_output.finished_recving
        if core is None or not done:
            return
        end_ns = monotonic_ns()
        # One rank may report invalid blocks steps before all ranks report completion. So the
        # failures come from the scheduler, which keeps them, or from this output if it does not.
        failed = set(getattr(connector_output, "failed_recving", None) or ())
        known = getattr(core.scheduler, "failed_recving_kv_req_ids", None)
        if known is not None:
            failed |= known
        elif getattr(connector_output, "invalid_block_ids", None):
            failed |= done
        for request_id in done:
            progress = core.progress_of(request_id)
            if progress is None or progress.coming is None:
                continue
            (start_ns, size_bytes, peer), progress.coming = progress.coming, None
            if request_id not in failed:
                core.probe.transferred(
                    progress.index, size_bytes, start_ns=start_ns, end_ns=end_ns, peer=peer
                )


def num_bytes(num_tokens: int, groups: Sequence[Group]) -> int:
    """Return the bytes of these tokens' blocks: blocks are sent whole."""
    whole = 0
    for group in groups:
        num_blocks = -(-num_tokens // group.block_tokens)
        if group.most_blocks is not None:
            num_blocks = min(num_blocks, group.most_blocks)
        whole += num_blocks * group.block_bytes
    return whole


def groups_of(scheduler: Any) -> list[Group]:
    """Return the groups of a scheduler's cache; none if it does not expose them.

    The configuration holds the layers of one rank; all ranks have the same number.
    """
    cache = getattr(scheduler, "kv_cache_config", None)
    num_ranks = int(scheduler.vllm_config.parallel_config.world_size)
    groups = []
    for group in getattr(cache, "kv_cache_groups", ()):
        spec = group.kv_cache_spec
        block_tokens = int(spec.block_size)
        window = getattr(spec, "sliding_window", None)
        groups.append(
            Group(
                block_tokens,
                int(spec.page_size_bytes) * len(group.layer_names) * num_ranks,
                None if not window else -(-int(window) // block_tokens) + 1,
            )
        )
    return groups


def peer_of(params: Any) -> str:
    """Return the origin of a request's blocks, as its router names it; empty if it does not.

    Without an address it is vLLM's id of the sending engine.
    """
    if not isinstance(params, dict):
        return ""
    host, port = params.get("remote_host"), params.get("remote_port")
    if host:
        return str(host) if port is None else f"{host}:{port}"
    return str(params.get("remote_engine_id") or "")
