"""Steps whose requests are those of the step before, each of which decodes one token.

Their rows differ from one step to the next in nothing but the contexts: with 64 requests a step of
such a team costs a third of one that is split anew.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from inferscope.adapters.vllm.phases import Part, Progress
from inferscope.probe import column
from inferscope.records import DECODE


class Team(NamedTuple):
    """Requests that decode one token each, step after step, until one joins or leaves."""

    ids: list[str]
    progress: list[Progress]
    digest: int
    requests: bytes
    phases: bytes
    tokens: bytes
    sampled: bytes

    def is_next(self, output: Any) -> bool:
        """Return whether a step is the next one of the team."""
        ids, cached = self.ids, output.scheduled_cached_reqs
        return bool(
            output.total_num_scheduled_tokens == len(ids)
            and not output.scheduled_spec_decode_tokens
            and not output.scheduled_new_reqs
            and not cached.resumed_req_ids
            and cached.req_ids == ids
            and list(output.num_scheduled_tokens) == ids
        )

    def has_emitted(self, outputs: Any, ended: list[tuple[str, str]] | None) -> bool:
        """Return whether a step's outputs are one token of each request, and none ended."""
        emitted = [output for of_client in (outputs or {}).values() for output in of_client.outputs]
        return (
            not ended
            and len(emitted) == len(self.ids)
            and all(len(one.new_token_ids) == 1 and one.finish_reason is None for one in emitted)
            and {one.request_id for one in emitted} == set(self.ids)
        )


def team_of(output: Any, parts: list[Part], digest: int) -> Team | None:
    """Return a step's requests as a team, if all of them decode one token."""
    num = len(parts)
    is_plain = output.total_num_scheduled_tokens == num
    if not is_plain or any(part.rows[0].phase != DECODE for part in parts):
        return None
    return Team(
        list(output.num_scheduled_tokens),
        [part.progress for part in parts],
        digest,
        column("I", [part.progress.index for part in parts]),
        bytes([DECODE]) * num,
        column("I", (1,) * num),
        column("H", (1,) * num),
    )
