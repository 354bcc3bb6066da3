"""A vLLM in miniature: the classes that are hooked, with the fields of 0.32 that hooks read.

It schedules for real: chunks of prompts under a budget, blocks, preemption of the last, draft
tokens, and, as with asynchronous scheduling, a step planned before the one before it is known.
"""

from __future__ import annotations

import copy
import enum
import os
import pickle
import random
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

BLOCK = 4


class Status(enum.IntEnum):
    WAITING = 1
    RUNNING = 5
    PREEMPTED = 6
    FINISHED_STOPPED = 7
    FINISHED_LENGTH_CAPPED = 8
    FINISHED_ABORTED = 9


class PauseState(enum.IntEnum):
    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


class Reason(enum.IntEnum):
    STOP = 0
    LENGTH = 1

    def __str__(self) -> str:
        return ("stop", "length")[self.value]


@dataclass
class SchedulerOutput:
    scheduled_new_reqs: list[Any]
    scheduled_cached_reqs: Any
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    preempted_req_ids: set[str] | None
    finished_req_ids: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Request:
    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    num_computed_tokens: int = 0
    num_outputs: int = 0
    num_placeholders: int = 0
    num_in_flight: int = 0
    num_drafts: int = 0
    status: Status = Status.WAITING
    lora_request: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    resumable: bool = False
    """A session: a turn that ends waits for a request of the same id, with new input or none."""

    def is_finished(self) -> bool:
        return self.status > Status.PREEMPTED

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_outputs


class BlockPool:
    """Keeps counts; what is cached, a test decides."""

    def __init__(self, num_gpu_blocks: int, get_num_free_blocks: Callable[[], int]) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.get_num_free_blocks = get_num_free_blocks
        self.hash_block_size = BLOCK
        self.cached_block_hash_to_block: dict[bytes, Any] = {}

    def _maybe_evict_cached_block(self, block: Any) -> bool:
        was_cached = self.cached_block_hash_to_block.pop(block.block_hash, None) is not None
        block.block_hash = None
        return was_cached

    def reset_prefix_cache(self) -> bool:
        self.cached_block_hash_to_block = {}
        return True


class KVCacheManager:
    """Holds the pool; the prefix cache is disabled until a test enables it."""

    def __init__(self, block_pool: BlockPool) -> None:
        self.block_pool = block_pool
        self.enable_caching = False
        self.num_kv_cache_groups = 1


class Scheduler:
    """Also a block pool, of which only the counts are kept."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        options = vllm_config.toy
        self.connector = options.connector
        spec = SimpleNamespace(block_size=BLOCK, page_size_bytes=100)
        group = SimpleNamespace(kv_cache_spec=spec, layer_names=["0", "1", "2"])
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group])
        self.rng = random.Random(options.seed)
        self.is_v2, self.num_drafts = options.is_v2, options.num_drafts
        self.max_num_scheduled_tokens = options.budget
        self.max_num_running_reqs = 4
        self.num_blocks = options.num_blocks
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.finished_req_ids: set[str] = set()
        self.running: list[Request] = []
        self.num_recomputed = 0
        self.num_preempted = 0
        self.pause_state = PauseState.UNPAUSED
        self.kv_cache_manager = KVCacheManager(BlockPool(self.num_blocks + 1, self._free))

    def set_pause_state(self, pause_state: PauseState) -> None:
        self.pause_state = pause_state

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def add_request(self, request: Request) -> None:
        session = self.requests.get(request.request_id)
        if session is not None:
            if request.num_prompt_tokens:
                session.num_prompt_tokens = session.num_computed_tokens + request.num_prompt_tokens
                session.num_outputs = 0
                session.status = Status.WAITING
                self.waiting.append(session)
            else:
                self.finish_requests(request.request_id, Status.FINISHED_ABORTED)
            return
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        left = self.max_num_scheduled_tokens
        if self.pause_state == PauseState.PAUSED_ALL:
            left = 0
        tokens: dict[str, int] = {}
        drafts: dict[str, list[int]] = {}
        preempted: set[str] = set()
        place = 0
        while place < len(self.running) and left:
            request = self.running[place]
            place += 1
            num_known = request.num_tokens + request.num_placeholders
            due = num_known - request.num_computed_tokens
            if not due or request.num_outputs + request.num_placeholders >= request.max_tokens:
                continue
            num_drafts = self.num_drafts if due == 1 and left > self.num_drafts else 0
            num = min(due, left) + num_drafts
            while not self._fits(request, num) and self.running[-1] is not request:
                self._preempt(self.running.pop(), preempted)
            if not self._fits(request, num):
                self._preempt(self.running.pop(), preempted)
                break
            tokens[request.request_id] = num
            if num_drafts:
                drafts[request.request_id] = [-1] * num_drafts
            left -= num
        cached = [self.requests[request_id] for request_id in tokens]
        news: list[Request] = []
        takes_new = self.pause_state == PauseState.UNPAUSED
        while self.waiting and left and takes_new and not preempted:
            request = self.waiting[0]
            if request.num_in_flight or len(self.running) >= self.max_num_running_reqs:
                break
            num = min(request.num_tokens - request.num_computed_tokens, left)
            if not self._fits(request, num):
                break
            self.waiting.popleft()
            self.running.append(request)
            tokens[request.request_id] = num
            left -= num
            news.append(request)
        resumed = [] if self.is_v2 else [r for r in news if r.status == Status.PREEMPTED]
        news = [request for request in news if request not in resumed]
        for request in news + resumed:
            request.status = Status.RUNNING
        rows = cached + resumed
        output = SchedulerOutput(
            [
                SimpleNamespace(
                    req_id=r.request_id,
                    num_computed_tokens=r.num_computed_tokens,
                    prompt_token_ids=[1] * r.num_prompt_tokens,
                )
                for r in news
            ],
            SimpleNamespace(
                req_ids=[r.request_id for r in rows],
                num_computed_tokens=[r.num_computed_tokens for r in rows],
                resumed_req_ids={r.request_id for r in resumed},
            ),
            tokens,
            sum(tokens.values()),
            drafts,
            preempted,
            self.finished_req_ids,
        )
        self.finished_req_ids = set()
        for request_id, num in tokens.items():
            request = self.requests[request_id]
            request.num_computed_tokens += num
            request.num_in_flight += num
            if request.num_computed_tokens >= request.num_tokens + request.num_placeholders:
                request.num_placeholders += 1 + len(drafts.get(request_id, ()))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        outputs = []
        for request_id, num in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            request.num_in_flight -= num
            sampled = model_runner_output.sampled_token_ids[
                model_runner_output.req_id_to_index[request_id]
            ]
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(request_id)
            is_stale = request.status == Status.PREEMPTED
            if drafts and not is_stale:
                rejected = len(drafts) - (len(sampled) - 1)
                request.num_computed_tokens -= rejected
                request.num_placeholders -= rejected
            if not sampled:
                continue
            del sampled[max(0, request.max_tokens - request.num_outputs) :]
            request.num_outputs += len(sampled)
            if not is_stale:
                request.num_placeholders -= len(sampled)
            is_over = request.num_outputs >= request.max_tokens
            reason = Reason.LENGTH if is_over else None
            if is_over and request.resumable:
                self.running.remove(request)
                request.num_computed_tokens -= request.num_placeholders
                request.num_placeholders = 0
            elif is_over:
                request.status = Status.FINISHED_LENGTH_CAPPED
                self._forget(request)
            outputs.append(
                SimpleNamespace(request_id=request_id, new_token_ids=sampled, finish_reason=reason)
            )
        return {0: SimpleNamespace(outputs=outputs)}

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> None:
        """Return nothing: none of the outputs is structured."""

    def finish_requests(self, request_ids: Any, finished_status: Status) -> list[Request] | None:
        wanted = list(self.requests) if request_ids is None else request_ids
        wanted = [wanted] if isinstance(wanted, str) else wanted
        ended = [self.requests[name] for name in wanted if name in self.requests]
        for request in ended:
            request.status = finished_status
            self._forget(request)
        return None if self.vllm_config.toy.returns_nothing else ended

    def shutdown(self) -> None:
        """End."""

    def _forget(self, request: Request) -> None:
        self.finished_req_ids.add(request.request_id)
        del self.requests[request.request_id]
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)

    def _preempt(self, request: Request, preempted: set[str]) -> None:
        self.num_preempted += 1
        request.status = Status.PREEMPTED
        request.num_computed_tokens = request.num_placeholders = 0
        self.waiting.appendleft(request)
        preempted.add(request.request_id)

    def _free(self) -> int:
        return self.num_blocks - sum(-(-r.num_computed_tokens // BLOCK) for r in self.running)

    def _fits(self, request: Request, num: int) -> bool:
        held = -(-request.num_computed_tokens // BLOCK)
        return -(-(request.num_computed_tokens + num) // BLOCK) - held <= self._free()


class Connector:
    """Brings nothing; the scheduler of a test tells it what vLLM's would."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Hear of a request's blocks."""

    def update_connector_output(self, connector_output: Any) -> None:
        """Hear of what workers have received."""


class ModelRunner:
    """Computes nothing; where a real one calls the model, and where it waits for the tokens."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def prepare(self) -> None:
        self.calls.append("prepare")

    def _model_forward(self, input_ids: Any = None) -> None:
        self.calls.append("forward")

    def _sample(self) -> None:
        self.calls.append("sample")

    def _bookkeeping_sync(self, scheduler_output: Any) -> None:
        self.calls.append("sync")


class Worker:
    """Executes nothing; knows from its own account which requests to sample."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.rank = 0
        self.device = SimpleNamespace(type="cpu", index=None)
        self.rng = random.Random(vllm_config.toy.seed)
        self.due: dict[str, int] = {}
        self.order: list[SchedulerOutput] = []
        self.model_runner = ModelRunner()

    def init_device(self) -> None:
        """Begin."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the cache."""

    def compile_or_warm_up_model(self) -> None:
        """Execute steps that no scheduler has planned, as the second model runner does."""
        for _ in range(4):
            tokens = {"_warmup_0_": 3, "_warmup_1_": 3}
            self.execute_model(SchedulerOutput([], None, tokens, 6, {}, None))
            self.sample_tokens({})

    def execute_model(self, scheduler_output: Any) -> Any:
        self.order.append(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            self.model_runner.prepare()
            self.model_runner._model_forward(input_ids=None)
        return None if scheduler_output.total_num_scheduled_tokens else "nothing"

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = self.order.pop()
        self.model_runner._sample()
        self.model_runner._bookkeeping_sync(output)
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            is_sampled = request_id in grammar_output
            sampled.append([9] * (1 + self.rng.randint(0, drafts)) if is_sampled else [])
        return SimpleNamespace(
            req_id_to_index={name: i for i, name in enumerate(ids)}, sampled_token_ids=sampled
        )

    def execute_dummy_batch(self) -> None:
        """Keep others company."""

    def shutdown(self) -> None:
        """End."""


class WorkerWrapperBase:
    def __init__(self, vllm_config: Any) -> None:
        self.worker = Worker(vllm_config)

    def init_device(self) -> None:
        self.worker.init_device()


class OutputProcessor:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def add_request(self, request: Any, prompt: Any, parent_req: Any = None) -> None:
        self.calls.append(request.request_id)

    def process_outputs(self, engine_core_outputs: list[Any]) -> Any:
        return SimpleNamespace(reqs_to_abort=[])


class MPClient:
    """Starts no process; notes the environment that one would inherit."""

    def __init__(
        self, vllm_config: Any, client_addresses: dict[str, Any] | None = None, fails: bool = False
    ) -> None:
        self.inherited = dict(os.environ)
        self._finalizer = weakref.finalize(self, list)
        if fails:
            raise RuntimeError("the engine does not start")

    def shutdown(self) -> None:
        self._finalizer.detach()


class AsyncLLM:
    def __init__(self, vllm_config: Any, client_index: int = 0) -> None:
        self.output_processor = OutputProcessor()
        self.engine_core = MPClient(vllm_config)

    def shutdown(self) -> None:
        if hasattr(self, "engine_core"):  # not in one that failed to begin
            self.engine_core.shutdown()


@dataclass
class Options:
    name: str = "r"
    """What the ids of its requests begin with."""
    seed: int = 0
    budget: int = 12
    num_blocks: int = 16
    num_drafts: int = 0
    is_async: int = False
    """How many steps are planned before the outputs of one are known."""
    bitmask: str = "dispatched"
    """When the bitmask is computed: before the step is executed ("early"), after that
    ("dispatched"), behind the outputs of the step before ("late"), or not at all ("never")."""
    is_v2: bool = False
    abort_every: int = 0
    returns_nothing: bool = False
    """`finish_requests` returns None, as in versions before 0.12."""
    pause_at: int = 0
    """The turn from which on it is paused for three; 0 for none."""
    lives: list[tuple[int, int]] = field(default_factory=list)
    is_shut_down: bool = True
    """Whether the engine ends by a shutdown; one that is dropped ends without."""
    connector: Any = None
    loras: list[Any] = field(default_factory=list)
    """LoRA requests of the first requests, in their order."""


def config(options: Options) -> Any:
    """Return a configuration with no more than what is read without fail."""
    return SimpleNamespace(
        toy=options,
        model_config=SimpleNamespace(model="toy"),
        cache_config=SimpleNamespace(block_size=BLOCK, num_gpu_blocks=options.num_blocks),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, world_size=1, data_parallel_index=0
        ),
    )


def serve(options: Options) -> tuple[Scheduler, list[Request]]:
    """Serve the requests to their end; the worker is another process as far as it can tell."""
    setting = config(options)
    wrapper = WorkerWrapperBase(setting)
    wrapper.init_device()
    wrapper.worker.initialize_from_config(None)
    with suppress(RuntimeError):  # an engine may go on without
        wrapper.worker.compile_or_warm_up_model()
    scheduler = Scheduler(setting)
    requests = [
        Request(f"{options.name}{i}", *life, lora_request=lora)
        for i, (life, lora) in enumerate(zip_longest(options.lives, options.loras))
    ]
    coming = deque(requests)
    flying: deque[tuple[SchedulerOutput, Any]] = deque()
    turn = 0
    while coming or scheduler.requests or flying:
        turn += 1
        if coming and turn % 2:
            scheduler.add_request(coming.popleft())
        if options.abort_every and turn % options.abort_every == 0 and scheduler.requests:
            scheduler.finish_requests([next(iter(scheduler.requests))], Status.FINISHED_ABORTED)
        if options.pause_at and turn == options.pause_at:
            scheduler.set_pause_state(PauseState.PAUSED_ALL)
        elif options.pause_at and turn == options.pause_at + 3:
            scheduler.set_pause_state(PauseState.UNPAUSED)
        output = scheduler.schedule()
        pickled = pickle.dumps(output)
        assert b"inferscope.adapters" not in pickled  # a worker may be where we are not installed
        sent = pickle.loads(pickled)
        if options.bitmask == "early":
            scheduler.get_grammar_bitmask(output)
        if wrapper.worker.execute_model(sent) is None:
            # Whose last known token is computed in this step: those are sampled.
            sampled = {
                name
                for name in output.num_scheduled_tokens
                if scheduler.requests[name].num_placeholders
            }
            if options.bitmask == "dispatched":
                scheduler.get_grammar_bitmask(output)
            flying.appendleft((output, wrapper.worker.sample_tokens(sampled)))
        else:
            scheduler.update_from_output(output, None)
        if len(flying) > options.is_async or (flying and not output.num_scheduled_tokens):
            done, result = flying.pop()
            scheduler.update_from_output(done, copy.deepcopy(result))
            if options.bitmask == "late":
                scheduler.get_grammar_bitmask(output)
        assert turn < 5000
    if options.is_shut_down:
        scheduler.shutdown()
        wrapper.worker.shutdown()
    return scheduler, requests
