"""KV blocks that another engine sends, as vLLM's core sees them come.

    schedule ───────────► connector.update_state_after_alloc    they are asked for
    update_from_output ─► connector.update_connector_output     they are all there

Both methods are of the interface of connectors, so any of them is seen that lets requests wait for
their blocks, and whose router says in `kv_transfer_params` where these are. A connector that loads
within a step makes nobody wait between the two: its time is the step's, and is not told.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns
from typing import Any, NamedTuple

from inferscope.adapters.patching import Patches
from inferscope.adapters.vllm_steps import Core


class Group(NamedTuple):
    """Layers whose blocks are counted together."""

    block_tokens: int
    block_bytes: int
    """Of all these layers, on all ranks of one copy of the model."""
    most_blocks: int | None = None
    """That are sent of a request: of layers that see a window, it and the block it begins in."""


class Transfers:
    """Tells of the blocks that one core's requests wait for."""

    def __init__(self, core: Core, groups: Sequence[Group]) -> None:
        """Take whose requests wait, and how large blocks are."""
        self._core = core
        self._groups = groups

    def install(self, patches: Patches, connector: Any) -> None:
        """Hook a scheduler's connector."""
        kind = type(connector)
        patches.around(kind, "update_state_after_alloc", before=self.asked)
        patches.around(kind, "update_connector_output", before=self.came)

    def asked(self, connector: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are allocated for a request; vLLM says so again, without tokens, later."""
        progress = self._core.progress_of(request.request_id)
        peer = peer_of(getattr(request, "kv_transfer_params", None))
        if progress is not None and peer and num_external_tokens:
            progress.coming = (monotonic_ns(), num_bytes(num_external_tokens, self._groups), peer)

    def came(self, connector: Any, connector_output: Any) -> None:
        """All blocks of some requests are there, or could not be had."""
        done = connector_output.finished_recving
        if not done:
            return
        end_ns = monotonic_ns()
        # One rank may say that blocks are not valid steps before all say that they are done, so
        # the scheduler is asked, which keeps that in mind; of one that does not, what it heard now.
        failed = set(getattr(connector_output, "failed_recving", None) or ())
        known = getattr(self._core.scheduler, "failed_recving_kv_req_ids", None)
        if known is not None:
            failed |= known
        elif getattr(connector_output, "invalid_block_ids", None):
            failed |= done
        for request_id in done:
            progress = self._core.progress_of(request_id)
            if progress is None or progress.coming is None:
                continue
            (start_ns, size_bytes, peer), progress.coming = progress.coming, None
            if request_id not in failed:
                self._core.probe.transferred(
                    progress.index, size_bytes, start_ns=start_ns, end_ns=end_ns, peer=peer
                )


def num_bytes(num_tokens: int, groups: Sequence[Group]) -> int:
    """Return what these tokens' blocks hold: a block is sent whole."""
    whole = 0
    for group in groups:
        num_blocks = -(-num_tokens // group.block_tokens)
        if group.most_blocks is not None:
            num_blocks = min(num_blocks, group.most_blocks)
        whole += num_blocks * group.block_bytes
    return whole


def groups_of(scheduler: Any) -> list[Group]:
    """Return the groups of a scheduler's cache, none where it does not tell of them.

    It knows the layers of one rank; all have as many.
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
    """Return where a request's blocks are, by what its router says; empty where it does not.

    vLLM's own id of the engine there stands for an address that is not told.
    """
    if not isinstance(params, dict):
        return ""
    host, port = params.get("remote_host"), params.get("remote_port")
    if host:
        return str(host) if port is None else f"{host}:{port}"
    return str(params.get("remote_engine_id") or "")
