"""Work and time of each phase over a run, as points of a roofline.

    intensity   = FLOPs / bytes moved between memory and device
    performance = FLOPs / device time of the phase

Bytes are sampled where a counter covers them, else modelled from the model's shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from inferscope.fold import FinalRequest, PhaseWork

_READ, _WRITE = "hbm_read_bytes", "hbm_write_bytes"


@dataclass(frozen=True)
class RooflinePoint:
    """Work of one phase over all finished requests; unknown amounts are None."""

    phase: str
    """prefill or decode."""
    num_requests: int
    """Requests that the sums hold."""
    tokens: int
    """Tokens computed."""
    compute_ns: int
    """Device time apportioned to the phase, summed over ranks."""
    flops: int | None
    """FLOPs by the model's shape."""
    hbm_bytes: int | None
    """Bytes read and written."""
    is_sampled: bool
    """Whether counters measured the bytes of all requests."""

    @property
    def flops_s(self) -> float | None:
        """Return FLOPs per second of the phase's device time."""
        return self._rate(self.flops)

    @property
    def bytes_s(self) -> float | None:
        """Return bytes per second of the phase's device time."""
        return self._rate(self.hbm_bytes)

    @property
    def flops_per_byte(self) -> float | None:
        """Return the arithmetic intensity."""
        if self.flops is None or not self.hbm_bytes:
            return None
        return self.flops / self.hbm_bytes

    @property
    def tok_s(self) -> float | None:
        """Return tokens per second of the phase's device time."""
        return self._rate(self.tokens)

    def _rate(self, amount: int | None) -> float | None:
        return amount * 1e9 / self.compute_ns if amount is not None and self.compute_ns else None


class PhaseTotals:
    """Sums over the finished requests whose compute is known."""

    def __init__(self) -> None:
        self._num = 0
        self._tokens, self._compute_ns = [0, 0], [0, 0]
        self._flops: list[int | None] = [0, 0]
        self._bytes: list[int | None] = [0, 0]
        self._is_sampled = [True, True]

    def add(self, request: FinalRequest) -> None:
        """Add a request; without a ledger its compute is unknown, and it is left out."""
        if request.ledger_missing:
            return
        self._num += 1
        parts = (
            (request.prefill_ns, request.prefill_flops, request.prefill_work, "prefill"),
            (request.decode_ns, request.decode_flops, request.decode_work, "decode"),
        )
        for at, (compute_ns, flops, work, phase) in enumerate(parts):
            sampled: dict[str, int] = getattr(request.counters, phase)
            self._tokens[at] += work.tokens
            self._compute_ns[at] += compute_ns
            self._flops[at] = _plus(self._flops[at], flops)
            self._bytes[at] = _plus(self._bytes[at], _moved_bytes(work, sampled))
            self._is_sampled[at] &= _READ in sampled and _WRITE in sampled

    def points(self) -> tuple[RooflinePoint, RooflinePoint]:
        """Return the points of prefill and of decode."""
        prefill, decode = (
            RooflinePoint(
                phase,
                self._num,
                self._tokens[at],
                self._compute_ns[at],
                self._flops[at],
                self._bytes[at],
                self._is_sampled[at] and self._num > 0,
            )
            for at, phase in enumerate(("prefill", "decode"))
        )
        return prefill, decode


def _moved_bytes(work: PhaseWork, sampled: dict[str, int]) -> int | None:
    """Return the bytes read and written, each sampled if it was."""
    read = sampled.get(_READ, work.hbm_read_bytes)
    return _plus(read, sampled.get(_WRITE, work.hbm_write_bytes))


def _plus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
