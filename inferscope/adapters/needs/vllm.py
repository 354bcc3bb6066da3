"""What `adapters/vllm` needs of vLLM."""

from __future__ import annotations

from inferscope.adapters.needs.feature import Engine, Feature, Fields, Place

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_FRONT_END = "vllm.v1.engine.async_llm:AsyncLLM"
_CLIENT = "vllm.v1.engine.core_client:MPClient"
_PROCESSOR = "vllm.v1.engine.output_processor:OutputProcessor"
_WRAPPER = "vllm.v1.worker.worker_base:WorkerWrapperBase"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
"""Those of other platforms inherit from it."""
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_RUNNER_V2 = "vllm.v1.worker.gpu.kv_connector:KVConnector"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"

VLLM = Engine(
    "vllm",
    "vllm",
    "inferscope run -- vllm serve MODEL",
    (
        Feature(
            "the scheduler",
            (
                Place(f"{_SCHEDULER}.__init__"),
                Place(f"{_SCHEDULER}.add_request", ("request",), is_open=False),
                Place(f"{_SCHEDULER}.schedule"),
                Place(
                    f"{_SCHEDULER}.update_from_output",
                    ("scheduler_output", "model_runner_output"),
                ),
                Place(
                    f"{_SCHEDULER}.finish_requests",
                    ("request_ids", "finished_status"),
                    is_open=False,
                ),
            ),
            (
                Fields(
                    _SCHEDULER,
                    (
                        *("vllm_config", "requests", "kv_cache_manager", "get_request_counts"),
                        *("max_num_running_reqs", "max_num_scheduled_tokens", "running"),
                    ),
                ),
                Fields("vllm.v1.core.kv_cache_manager:KVCacheManager", ("block_pool",)),
                Fields(
                    "vllm.v1.core.block_pool:BlockPool",
                    ("num_gpu_blocks", "get_num_free_blocks", "cached_block_hash_to_block"),
                ),
                Fields(
                    "vllm.v1.core.sched.output:SchedulerOutput",
                    (
                        *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
                        *("total_num_scheduled_tokens", "scheduled_spec_decode_tokens"),
                        "preempted_req_ids",
                    ),
                ),
                Fields(
                    "vllm.v1.core.sched.output:NewRequestData", ("req_id", "num_computed_tokens")
                ),
                Fields(
                    "vllm.v1.core.sched.output:CachedRequestData",
                    ("req_ids", "num_computed_tokens", "resumed_req_ids"),
                ),
                Fields(
                    "vllm.v1.request:Request", ("request_id", "num_prompt_tokens", "is_finished")
                ),
                Fields(
                    "vllm.v1.outputs:ModelRunnerOutput", ("req_id_to_index", "sampled_token_ids")
                ),
                Fields("vllm.v1.engine:EngineCoreOutputs", ("outputs",)),
                Fields(
                    "vllm.v1.engine:EngineCoreOutput",
                    ("request_id", "new_token_ids", "finish_reason"),
                ),
            ),
            is_needed=True,
        ),
        Feature("records beside the device", (Place(f"{_SCHEDULER}.get_grammar_bitmask"),)),
        Feature("its shutdown in good order", (Place(f"{_SCHEDULER}.shutdown", is_open=False),)),
        Feature(
            "pauses", (Place(f"{_SCHEDULER}.set_pause_state", ("pause_state",), is_open=False),)
        ),
        Feature(
            "KV transfers",
            (
                Place(
                    f"{_CONNECTOR}.update_state_after_alloc",
                    ("request", "blocks", "num_external_tokens"),
                    is_open=False,
                ),
                Place(
                    f"{_CONNECTOR}.update_connector_output", ("connector_output",), is_open=False
                ),
            ),
            (
                Fields(_SCHEDULER, ("kv_cache_config",)),
                Fields("vllm.v1.outputs:KVConnectorOutput", ("finished_recving",)),
            ),
        ),
        Feature(
            "cache forensics",
            (
                Place(f"{_POOL}._maybe_evict_cached_block", ("block",)),
                Place(f"{_POOL}.reset_prefix_cache", is_open=False),
            ),
            (
                Fields(_POOL, ("hash_block_size", "cached_block_hash_to_block")),
                Fields(
                    "vllm.v1.core.kv_cache_manager:KVCacheManager",
                    ("enable_caching", "block_pool", "num_kv_cache_groups"),
                ),
                Fields("vllm.v1.core.kv_cache_utils:KVCacheBlock", ("block_id", "block_hash")),
                Fields("vllm.v1.core.sched.output:NewRequestData", ("block_ids",)),
                Fields("vllm.v1.core.sched.output:CachedRequestData", ("new_block_ids",)),
                Fields("vllm.v1.request:Request", ("block_hashes", "num_computed_tokens")),
            ),
        ),
        Feature("the front end", (Place(f"{_FRONT_END}.__init__", ("vllm_config",)),)),
        Feature(
            "requests at the front end",
            (
                Place(f"{_PROCESSOR}.add_request", ("request", "prompt", "parent_req")),
                Place(f"{_PROCESSOR}.process_outputs", ("engine_core_outputs",)),
            ),
            (
                Fields(_FRONT_END, ("output_processor",)),
                Fields(
                    "vllm.v1.engine:EngineCoreRequest",
                    ("request_id", "prompt_token_ids", "external_req_id"),
                ),
                Fields("vllm.v1.engine.output_processor:OutputProcessorOutput", ("reqs_to_abort",)),
            ),
        ),
        Feature("the front end's shutdown in good order", (Place(f"{_FRONT_END}.shutdown"),)),
        Feature("engines beside each other in a process", (Place(f"{_CLIENT}.__init__"),)),
        Feature("the worker", (Place(f"{_WRAPPER}.init_device", is_open=False),)),
        Feature(
            "steps of the worker",
            (
                Place(f"{_WORKER}.initialize_from_config"),
                Place(f"{_WORKER}.compile_or_warm_up_model", is_open=False),
                Place(f"{_WORKER}.execute_model", ("scheduler_output",)),
                Place(f"{_WORKER}.sample_tokens"),
            ),
            (
                Fields(_WRAPPER, ("worker",)),
                Fields(_WORKER, ("vllm_config", "rank", "device", "model_runner")),
            ),
            is_needed=True,
        ),
        Feature("steps of an idle replica", (Place(f"{_WORKER}.execute_dummy_batch"),)),
        Feature(
            "the worker's shutdown in good order", (Place(f"{_WORKER}.shutdown", is_open=False),)
        ),
        Feature(
            "device spans that begin at the forward",
            (Place(f"{_RUNNER}._model_forward"),),
            otherwise=(Place(f"{_RUNNER_V2}.pre_forward"),),
        ),
        Feature(
            "device spans that end before the host waits", (Place(f"{_RUNNER}._bookkeeping_sync"),)
        ),
    ),
)
