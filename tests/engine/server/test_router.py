"""Router without engines: what clients get while one of them is away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from inferscope.engine import Sampling
from inferscope.engine.server.router import Router
from inferscope.engine.server.wire import Refused, Submit


class _Client:
    """Receiver that keeps its rejection."""

    def __init__(self) -> None:
        self.refused: Refused | None = None

    def take_tokens(self, tokens: Sequence[int], finish: object, logprobs: object = ()) -> None:
        raise AssertionError("no engine has sent tokens")

    def take_cached_tokens(self, num_tokens: int) -> None:
        raise AssertionError("no engine has admitted it")

    def take_refusal(self, refused: Refused) -> None:
        self.refused = refused


@pytest.mark.parametrize("is_decode_lost", [False, True])
def test_request_while_an_engine_is_away_gets_the_reason_and_leaves_nothing(
    tmp_path: Path, is_decode_lost: bool
) -> None:
    async def ask() -> tuple[Refused | None, str, int]:
        (tmp_path / "prefill").mkdir()
        router = Router(tmp_path, tmp_path / "prefill", "api-0")
        assert router.outage == ""
        router._prefill.is_lost = True  # as while its successor loads
        if is_decode_lost:
            router.mark_lost()
        client = _Client()
        router.submit(Submit("a", [1, 2, 3], Sampling(), external_id=None, parent=""), client)
        found = client.refused, router.outage, len(router._legs)
        router.close()
        return found

    refused, outage, num_legs = asyncio.run(ask())
    assert refused is not None
    assert refused.message == outage
    assert refused.kind == "stopped"
    assert ("Start the server again" in outage) == is_decode_lost
    assert ("its successor may be loading" in outage) == (not is_decode_lost)
    assert num_legs == 0
