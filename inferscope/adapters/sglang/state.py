"""State of SGLang's requests and batches that one hook keeps for a later one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from inferscope.adapters.sglang.phases import Part, Rows
from inferscope.records import RequestIndex

MARK = "_inferscope"
"""Attribute of SGLang's `Req` that holds our `Followed`, so that it is freed with the request."""


class Followed:
    """State of a request while SGLang holds it.

    It ends with SGLang's own object. What had not ended by then, ended where no hook is.
    """

    __slots__ = (
        "_left",
        "has_ended",
        "has_run",
        "index",
        "is_held",
        "num_emitted",
        "number",
        "seen",
    )

    def __init__(self, index: int, left: deque[RequestIndex], *, number: int | None = None) -> None:
        """Follow a request.

        Args:
            index: of the request.
            left: takes the index if the request goes before its end was seen.
            number: on all ranks; None for the index.
        """
        self._left = left
        self.index = RequestIndex(index)
        self.number = index if number is None else number
        """Number of the request, equal on all ranks."""
        self.seen = 0
        """Number of positions computed so far."""
        self.num_emitted = 0
        self.has_run = False
        self.is_held = False
        self.has_ended = False

    # A collector may run this anywhere, in a call of the probe too: so it calls nothing.
    def __del__(self) -> None:
        if not self.has_ended:
            self._left.append(self.index)


class Team:
    """Requests of consecutive equal decode batches, with the columns that do not change."""

    __slots__ = ("contexts", "followed", "requests", "rows")

    def __init__(self, requests: list[Any], followed: list[Followed], rows: Rows) -> None:
        self.requests = requests
        self.followed = followed
        self.rows = rows
        self.contexts = rows.contexts

    def settle(self) -> None:
        """Update the requests' computed positions once, which costs less than at each step."""
        for followed, context in zip(self.followed, self.contexts, strict=True):
            followed.seen = max(followed.seen, context + 1)


class Launch:
    """A batch that is being launched: references to what it holds, for its columns mutate later.

    Attributes:
        at_ns: when it was about to be launched.
        scheduled_ns: when scheduling it began and ended, 0 where that is not known.
        preempted: indices of the requests that lost their KV for it.
        kind: what runs cold the first time: its forward mode, and whether it is a graph.
        is_cold: no batch of its kind has run before.
        contexts: of its requests, where it repeats the last batch.
        padded_tokens: the captured size that it is padded to, 0 without a graph.
        is_dummy: it has none of the requests that are recorded.
        is_over: the model worker has returned.
        is_speculative: it decodes by drafts: how far it gets is known with its result.
        rows: made and not recorded yet.
    """

    __slots__ = (
        "at_ns",
        "batch",
        "contexts",
        "decoding",
        "extend_lens",
        "is_cold",
        "is_decoding",
        "is_dummy",
        "is_extending",
        "is_over",
        "is_speculative",
        "kind",
        "lengths",
        "logprob_starts",
        "mode",
        "padded_tokens",
        "preempted",
        "prefix_lens",
        "requests",
        "rows",
        "scheduled_ns",
        "step",
        "tail",
    )

    extend_lens: Any
    prefix_lens: Any
    logprob_starts: Any
    decoding: Any
    preempted: list[int]
    contexts: list[int]
    padded_tokens: int
    kind: tuple[str, bool]
    is_dummy: bool
    is_cold: bool

    def __init__(
        self, batch: Any, step: int, mode: str, *, at_ns: int, scheduled_ns: tuple[int, int]
    ) -> None:
        self.batch, self.step, self.mode = batch, step, mode
        self.at_ns, self.scheduled_ns = at_ns, scheduled_ns
        self.requests = batch.reqs
        self.lengths = batch.seq_lens_cpu
        # Of now: a speculative worker changes it while the batch runs.
        is_decode = mode == "DECODE"  # the usual one, without two calls before its launch
        self.is_extending = not is_decode and batch.forward_mode.is_extend()
        self.is_decoding = is_decode or batch.forward_mode.is_decode()
        self.is_speculative = self.is_decoding and not batch.spec_algorithm.is_none()
        self.tail = getattr(batch, "beam_tail", None)
        if mode != "DECODE":
            self.extend_lens, self.prefix_lens = batch.extend_lens, batch.prefix_lens
            self.logprob_starts = batch.extend_logprob_start_lens if batch.return_logprob else None
            self.decoding = batch.decoding_reqs
        self.is_over = False
        self.rows: Rows | None = None

    def parts(self) -> Iterator[tuple[Any, Followed, Part]]:
        """Yield the requests that are recorded, and their parts."""
        requests, is_extending = self.requests, self.is_extending
        if is_extending or not self.is_decoding:
            tokens = self.extend_lens or [0] * len(requests)
            contexts = self.prefix_lens or [0] * len(requests)
            starts = self.logprob_starts
        else:
            lengths = None if self.lengths is None else self.lengths.tolist()
            tokens, starts = [1] * len(requests), [0] * len(requests)
            tail = self.tail
            for entry in () if tail is None else tail.entries:  # beams beside their request's row
                tokens[entry.leader_idx] += entry.end - entry.start
            contexts = [
                request.seqlen - 1 if lengths is None else length - 1
                for request, length in zip(requests, lengths or tokens, strict=False)
            ]
        decoding = {id(request) for request in self.decoding or ()} if is_extending else set()
        for at, request in enumerate(requests):
            followed = getattr(request, MARK, None)
            if followed is None:  # a health check, or it came before us
                continue
            num, is_decoding = tokens[at], id(request) in decoding
            yield (
                request,
                followed,
                Part(
                    followed.index,
                    contexts[at],
                    num,
                    len(request.origin_input_ids),
                    followed.seen,
                    1 if starts is None or is_decoding else max(1, num - starts[at]),
                    is_decoding,
                    number=followed.number,
                ),
            )


class Verified(NamedTuple):
    """The result of a speculative batch."""

    step: int
    mode: str
    before: list[tuple[Any, int, int]]
    """Its requests, positions computed and tokens put out before the result."""
    num_after: list[int]
    """Tokens put out after it."""
    stride: int
    """Tokens verified of each request."""
    num_not_drafted: int
    """New tokens of each request that were no drafts."""

    def parts(self) -> Iterator[Part]:
        """Yield the parts of the requests that are recorded."""
        for (request, context, num_before), num_after in zip(
            self.before, self.num_after, strict=True
        ):
            followed = getattr(request, MARK, None)
            if followed is not None:
                yield Part(
                    followed.index,
                    context,
                    self.stride,
                    len(request.origin_input_ids),
                    sampled=self.stride,
                    accepted=max(0, num_after - num_before - self.num_not_drafted),
                    number=followed.number,
                )
