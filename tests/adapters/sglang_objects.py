"""A scheduler shaped like SGLang's, small and deterministic: what our hooks touch, as they find it.

It chunks and mixes, overlaps (a result is processed after the next launch), retracts when its pool
is short, skips finished requests as SGLang does, and drops the token of a step that was under way
when its request was retracted.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from enum import IntEnum, auto
from typing import Any


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    PREBUILT = auto()

    def is_extend(self) -> bool:
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY)

    def is_decode(self) -> bool:
        return self == ForwardMode.DECODE


class Speculation:
    def __init__(self, *, is_on: bool = False) -> None:
        self.is_on = is_on

    def is_none(self) -> bool:
        return not self.is_on


class Tensor(list[int]):
    def tolist(self) -> list[int]:
        return list(self)


class Reason:
    def __init__(self, kind: str, **rest: Any) -> None:
        self.fields = {"type": kind, **rest}

    def to_json(self) -> dict[str, Any]:
        return self.fields


class Req:
    def __init__(self, rid: str, num_prompt: int, max_new: int) -> None:
        self.rid = rid
        self.origin_input_ids = list(range(num_prompt))
        self.output_ids: list[int] = []
        self.max_new = max_new
        self.computed = 0
        self.finished_reason: Reason | None = None
        self.to_finish: Reason | None = None
        self.finished_len: int | None = None
        self.is_retracted = False
        self.lora_id: str | None = None

    @property
    def seqlen(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)


class Batch:
    def __init__(self, reqs: list[Req], mode: ForwardMode = ForwardMode.DECODE) -> None:
        self.reqs = reqs
        self.forward_mode = mode
        self.batch_is_full = False
        self.extend_lens: list[int] | None = None
        self.prefix_lens: list[int] | None = None
        self.extend_logprob_start_lens: list[int] | None = None
        self.decoding_reqs: list[Req] | None = None
        self.seq_lens_cpu: Tensor | None = None
        self.beam_tail: Any = None
        self.return_logprob = False
        self.spec_algorithm = Speculation()
        self.forward_iter: int | None = None

    def copy(self) -> Batch:
        copied = Batch(self.reqs[:], self.forward_mode)
        copied.forward_iter = self.forward_iter
        return copied


class Abort:
    def __init__(self, reason: dict[str, Any] | None) -> None:
        self.finished_reason = reason


class TpModelWorker:
    def forward_batch_generation(self, batch: Batch) -> list[int]:
        return [zlib.crc32(f"{req.rid} {req.seqlen}".encode()) for req in batch.reqs]

    def forward_batch_embedding(self, batch: Batch) -> list[int]:
        raise NotImplementedError


class SchedulerOutputStreamer:
    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []

    def stream_output(self, reqs: list[Req], return_logprob: bool, skip_req: Any = None) -> None:
        self.sent += [(req.rid, len(req.output_ids)) for req in reqs if req is not skip_req]


class Scheduler:
    def __init__(self, *, pool: int = 10_000, chunk: int = 16, overlap: bool = True) -> None:
        self.forward_ct = 0
        self.waiting_queue: list[Req] = []
        self.running_batch = Batch([])
        self.chunked_req: Req | None = None
        self.model_worker = self.tp_worker = self.make_worker()
        self.output_streamer = self.make_streamer()
        self.aborted: list[str] = []
        self._pool, self._chunk, self._overlap = pool, chunk, overlap
        self._results: deque[tuple[Batch, list[int], list[Req]]] = deque()

    def make_worker(self) -> TpModelWorker:
        return TpModelWorker()

    def make_streamer(self) -> SchedulerOutputStreamer:
        return SchedulerOutputStreamer()

    # --- what SGLang calls so -----------------------------------------------------------------

    def run_event_loop(self) -> None:
        while self.waiting_queue or self.running_batch.reqs or self.chunked_req or self._results:
            self.iterate()

    def iterate(self) -> None:
        batch = self.get_next_batch_to_run(self.running_batch)
        if batch is not None:
            result = self.run_batch(batch)
            middle = [self.chunked_req] if self.chunked_req else []
            self._results.append((batch.copy(), result, middle))
        if self._results and (len(self._results) > self._overlap or batch is None):
            done, result, middle = self._results.popleft()
            self.process_batch_result(done, (result, middle))

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        self.waiting_queue.append(req)

    def send_abort_output(self, abort_req: Abort, req: Req) -> None:
        self.aborted.append(req.rid)

    def get_next_batch_to_run(self, running_batch: Batch) -> Batch | None:
        running = self.running_batch.reqs = [
            req for req in self.running_batch.reqs if req.finished_reason is None
        ]
        ending = {req for batch, _, _ in self._results for req in batch.reqs}
        ready = [
            req for req in running if req not in ending or len(req.output_ids) + 1 < req.max_new
        ]
        prefills, lens, room = [], [], self._chunk
        queue = ([self.chunked_req] if self.chunked_req else []) + self.waiting_queue
        self.chunked_req = None
        for req in queue:
            num = min(room, req.seqlen - req.computed)
            if num <= 0 or (req in self.waiting_queue and self._used() + req.seqlen > self._pool):
                break
            if req in self.waiting_queue:
                self.waiting_queue.remove(req)
            prefills.append(req)
            lens.append(num)
            room -= num
            if req.computed + num < req.seqlen:
                self.chunked_req = req
        if not prefills:
            while len(ready) > 1 and self._used() + len(ready) > self._pool:
                victim = ready.pop()
                running.remove(victim)
                victim.computed, victim.is_retracted = 0, True
                self._add_request_to_queue(victim, is_retracted=True)
            if not ready:
                return None
            return self._decoding(ready)
        mixed = [req for req in ready if req not in prefills]
        batch = Batch(prefills + mixed, ForwardMode.MIXED if mixed else ForwardMode.EXTEND)
        batch.decoding_reqs = mixed or None
        batch.extend_lens = lens + [1] * len(mixed)
        batch.prefix_lens = [req.computed for req in batch.reqs]
        for req in prefills:
            req.is_retracted = False
        self._advance(batch.reqs, batch.extend_lens)
        running += [req for req in prefills if req is not self.chunked_req]
        return batch

    def run_batch(self, batch: Batch) -> list[int]:
        self.forward_ct += 1
        batch.forward_iter = self.forward_ct
        result = self.model_worker.forward_batch_generation(batch)
        batch.extend_lens = batch.prefix_lens = None  # as good as: the batch mutates later
        return result

    def process_batch_result(self, batch: Batch, result: tuple[list[int], list[Req]]) -> None:
        tokens, middle = result
        for req, token in zip(batch.reqs, tokens, strict=True):
            if req.finished_reason is not None or req.is_retracted or req in middle:
                continue
            req.output_ids.append(token)
            if req.to_finish is not None:
                req.finished_reason = req.to_finish
            elif len(req.output_ids) >= req.max_new:
                req.finished_reason = Reason("length", length=req.max_new)
        self.output_streamer.stream_output(batch.reqs, False, middle[0] if middle else None)

    # --- its own ------------------------------------------------------------------------------

    def _used(self) -> int:
        return sum(req.computed for req in self.running_batch.reqs)

    def _decoding(self, reqs: list[Req]) -> Batch:
        self._advance(reqs, [1] * len(reqs))
        batch = Batch(reqs)
        batch.seq_lens_cpu = Tensor(req.computed for req in reqs)
        batch.decoding_reqs = reqs[:1]  # stale
        return batch

    @staticmethod
    def _advance(reqs: list[Req], lens: list[int]) -> None:
        for req, num in zip(reqs, lens, strict=True):
            req.computed += num


Hook = Callable[..., Any]


def hooked(hooks: dict[str, Hook]) -> type[Scheduler]:
    """Return the scheduler with hooks around its methods, as SGLang's registry places them."""
    scheduler = type("Scheduler", (Scheduler,), {})
    worker = type("TpModelWorker", (TpModelWorker,), {})
    streamer = type("SchedulerOutputStreamer", (SchedulerOutputStreamer,), {})
    kinds = {kind.__name__: kind for kind in (scheduler, worker, streamer)}
    for target, hook in hooks.items():
        owner, name = target.split(".")[-2:]
        if owner not in kinds:  # its radix cache: there is none here
            continue
        setattr(kinds[owner], name, _wrapped(getattr(kinds[owner], name), hook))
    scheduler.make_worker = lambda self: worker()  # type: ignore[method-assign]
    scheduler.make_streamer = lambda self: streamer()  # type: ignore[method-assign]
    return scheduler


def _wrapped(original: Hook, hook: Hook) -> Hook:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return wrapper
