"""What `adapters/sglang` needs of SGLang."""

from __future__ import annotations

from inferscope.adapters.needs.feature import Engine, Feature, Fields, Place

_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
_WORKER = "sglang.srt.managers.tp_worker:TpModelWorker"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer:SchedulerOutputStreamer"
_MANAGER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
_SIGNALS = "sglang.srt.managers.tokenizer_manager:SignalHandler"
_BATCH = "sglang.srt.managers.schedule_batch:ScheduleBatch"
_TREE = "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache"
_CACHE_EVENTS = "sglang.srt.mem_cache.events:KVCacheEventRecorder"
_NODE = "sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeNode"
_KEY = "sglang.srt.mem_cache.radix_cache:RadixKey"
_REQUEST = "sglang.srt.managers.schedule_batch:Req"

SGLANG = Engine(
    "sglang",
    "sglang",
    "inferscope run -- python -m sglang.launch_server --model-path MODEL",
    (
        Feature(
            "the registry of hooks",
            (Place("sglang.srt.plugins.hook_registry:HookRegistry.register"),),
            (Fields("sglang.srt.plugins.hook_registry:HookType", ("AROUND",)),),
            is_needed=True,
        ),
        Feature(
            "the scheduler",
            (
                Place(f"{_SCHEDULER}.run_event_loop"),
                Place(f"{_SCHEDULER}._add_request_to_queue", ("req",)),
                Place(f"{_SCHEDULER}.run_batch", ("batch",)),
                Place(f"{_SCHEDULER}.process_batch_result", ("batch", "result")),
                Place(f"{_WORKER}.forward_batch_generation"),
                Place(f"{_STREAMER}.stream_output", ("reqs",)),
            ),
            (
                Fields("sglang.srt.runtime_context", ("get_parallel",)),
                Fields(
                    _SCHEDULER,
                    (
                        *("forward_ct", "waiting_queue", "running_batch", "chunked_req"),
                        *("server_args", "model_config", "page_size", "device", "tp_worker"),
                        *("model_worker", "max_running_requests", "max_total_num_tokens"),
                        *("token_to_kv_pool_allocator", "tree_cache", "is_hybrid_swa"),
                        *("chunked_prefill_size", "max_prefill_tokens"),
                    ),
                ),
                Fields(_WORKER, ("model_runner",)),
                Fields(
                    _BATCH,
                    (
                        *("reqs", "forward_mode", "extend_lens", "prefix_lens", "seq_lens_cpu"),
                        *("decoding_reqs", "return_logprob", "extend_logprob_start_lens"),
                        *("spec_algorithm", "forward_iter", "batch_is_full"),
                    ),
                ),
                Fields(
                    _REQUEST,
                    (
                        *("rid", "origin_input_ids", "output_ids", "is_retracted", "seqlen"),
                        *("finished_len", "finished_reason"),
                    ),
                ),
            ),
            is_needed=True,
        ),
        Feature("when scheduling began", (Place(f"{_SCHEDULER}.get_next_batch_to_run"),)),
        Feature(
            "when scheduling began in a disaggregated engine",
            (
                Place(f"{_SCHEDULER}.get_next_disagg_prefill_batch_to_run"),
                Place(f"{_SCHEDULER}.get_next_disagg_decode_batch_to_run"),
            ),
        ),
        Feature(
            "how requests end outside of a batch",
            (Place(f"{_SCHEDULER}.send_abort_output", ("abort_req", "req")),),
        ),
        Feature("steps of embeddings", (Place(f"{_WORKER}.forward_batch_embedding"),)),
        Feature(
            "pauses",
            (
                Place(f"{_SCHEDULER}.pause_generation"),
                Place(f"{_SCHEDULER}.continue_generation"),
                Place(f"{_MANAGER}.pause_generation"),
                Place(f"{_MANAGER}.continue_generation"),
            ),
        ),
        Feature(
            "cache forensics",
            (
                Place(f"{_TREE}.checkpoint_into_tree", ("req", "up_to")),
                Place(f"{_TREE}._evict"),
                Place(f"{_TREE}.reset"),
                Place(f"{_BATCH}.prepare_for_extend"),
                Place(f"{_BATCH}.prepare_for_decode"),
                Place(f"{_BATCH}.check_decode_mem"),
            ),
            (
                Fields(_TREE, ("disable", "is_swa_enabled", "is_mamba_enabled")),
                Fields(
                    _REQUEST, ("return_logprob", "logprob_start_len", "full_untruncated_fill_ids")
                ),
            ),
        ),
        Feature(
            "evicted nodes of the radix cache",
            (Place(f"{_CACHE_EVENTS}.record_remove", ("node",)),),
            (
                Fields(_NODE, ("id", "key", "parent")),
                Fields(_KEY, ("token_ids", "extra_key", "cache_salt")),
            ),
        ),
        Feature(
            "requests at the front end",
            (
                Place(f"{_MANAGER}.__init__"),
                Place(f"{_MANAGER}._send_one_request", ("tokenized_obj",)),
                Place(f"{_MANAGER}._handle_batch_output", ("recv_obj",)),
            ),
            (Fields(_MANAGER, ("rid_to_state", "server_args")),),
        ),
        Feature(
            "several prompts in one request",
            (Place(f"{_MANAGER}._send_batch_request", ("tokenized_objs",)),),
        ),
        Feature(
            "the end of a front end whose scheduler has crashed",
            (Place(f"{_SIGNALS}.running_phase_sigquit_handler"),),
        ),
    ),
)
