"""Sums over the steps of one request: other requests, time shared, tokens computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from inferscope.fold import FinalStep
from inferscope.insight.facts import Computing, Overlap
from inferscope.records import DRAFT, PREFILL, RECOMPUTED


class RequestOverlaps:
    """Other requests, with the time that each overlapped this one."""

    def __init__(self) -> None:
        self._sums: dict[str, list[int]] = {}
        """Number of steps, overlap in ns, tokens, compute in ns."""

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, request_id: str, overlap_ns: int, num_tokens: int, compute_ns: int) -> None:
        """Add a request's share of one step."""
        sums = self._sums.setdefault(request_id, [0, 0, 0, 0])
        sums[0] += 1
        sums[1] += overlap_ns
        sums[2] += num_tokens
        sums[3] += compute_ns

    def ranked(self, names: Mapping[str, str], *, by_compute: bool = False) -> tuple[Overlap, ...]:
        """Return all requests, ranked by overlap or by compute time.

        Args:
            names: display names by internal ID.
            by_compute: rank by attributed time.
        """
        first = 3 if by_compute else 1
        ranked = sorted(
            self._sums.items(), key=lambda item: (-item[1][first], -item[1][2], item[0])
        )
        return tuple(
            Overlap(names.get(request_id, request_id), *sums) for request_id, sums in ranked
        )


class StepsWhileQueued:
    """Steps of other requests while one request waited for admission.

    Attributes:
        prefill_ns: device time attributed to prefill meanwhile; `decode_ns` likewise.
    """

    def __init__(self) -> None:
        self._companions = RequestOverlaps()
        self.prefill_ns = 0
        self.decode_ns = 0

    def add(self, step: FinalStep, waited_ns: int) -> None:
        """Add a step.

        Args:
            step: of other requests.
            waited_ns: part of it during which the request waited.
        """
        part = waited_ns / (step.end_ns - step.start_ns)
        for request_id, work in _works(step).items():
            prefill_ns, decode_ns = round(work.prefill_ns * part), round(work.decode_ns * part)
            self.prefill_ns += prefill_ns
            self.decode_ns += decode_ns
            self._companions.add(request_id, waited_ns, work.num_tokens, prefill_ns + decode_ns)

    def ranked(self, names: Mapping[str, str]) -> tuple[Overlap, ...]:
        """Return the requests in these steps, ranked by compute time."""
        return self._companions.ranked(names, by_compute=True)


class SharedSteps:
    """Steps that a request was in, by its phase."""

    def __init__(self) -> None:
        self._phases = {True: _Phase(), False: _Phase()}
        """Sums by whether the phase is prefill."""

    def add(self, step: FinalStep, me: str) -> tuple[tuple[str, int], ...]:
        """Add a step that `me` was in; a draft model's is neither prefill nor decode.

        Returns:
            Requests whose prompts it computed during a decode of `me`, with their token counts.
        """
        if bool((step.phases == DRAFT).all()):
            return ()
        works = _works(step)
        own = works.pop(me)
        phase = self._phases[own.is_prefill]
        same = [item for item in works.items() if item[1].is_prefill == own.is_prefill]
        other = [item for item in works.items() if item[1].is_prefill != own.is_prefill]
        overlap_ns = step.end_ns - step.start_ns
        for companions, items in ((phase.same, same), (phase.other, other)):
            for request_id, work in items:
                companions.add(request_id, overlap_ns, work.num_tokens, work.compute_ns)
        phase.num_steps += 1
        phase.num_tokens += own.num_tokens
        phase.num_recomputed += own.num_recomputed
        phase.sum_same += len(same) + 1
        phase.most_same = max(phase.most_same, len(same) + 1)
        phase.num_mixed += bool(other)
        phase.sum_other += len(other)
        if own.is_prefill:
            return ()
        return tuple((request_id, work.num_tokens) for request_id, work in other)

    def computing(self, names: Mapping[str, str], *, is_prefill: bool) -> Computing:
        """Return the facts of one phase."""
        phase = self._phases[is_prefill]
        return Computing(
            num_steps=phase.num_steps,
            num_tokens=phase.num_tokens,
            num_recomputed=phase.num_recomputed,
            num_mixed=phase.num_mixed,
            mean_same=phase.sum_same / phase.num_steps if phase.num_steps else 0.0,
            most_same=phase.most_same,
            mean_other=phase.sum_other / phase.num_mixed if phase.num_mixed else 0.0,
            same=phase.same.ranked(names),
            other=phase.other.ranked(names),
        )


@dataclass
class _Phase:
    num_steps: int = 0
    num_tokens: int = 0
    num_recomputed: int = 0
    num_mixed: int = 0
    sum_same: int = 0
    most_same: int = 0
    sum_other: int = 0
    same: RequestOverlaps = field(default_factory=RequestOverlaps)
    other: RequestOverlaps = field(default_factory=RequestOverlaps)


@dataclass
class _Work:
    """One request's part of one step, over all of its rows."""

    is_prefill: bool = False
    num_tokens: int = 0
    num_recomputed: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0

    @property
    def compute_ns(self) -> int:
        return self.prefill_ns + self.decode_ns


def _works(step: FinalStep) -> dict[str, _Work]:
    """Return each request's work in a step."""
    works: dict[str, _Work] = {}
    columns = zip(
        step.request_ids,
        step.phases.tolist(),
        step.tokens.tolist(),
        step.flags.tolist(),
        step.shares_ns.tolist(),
        strict=True,
    )
    for request_id, phase, tokens, flags, share_ns in columns:
        work = works.setdefault(request_id, _Work())
        work.num_tokens += tokens
        if phase == PREFILL:
            work.is_prefill = True
            work.prefill_ns += share_ns
            work.num_recomputed += tokens if flags & RECOMPUTED else 0
        else:
            work.decode_ns += share_ns
    return works
