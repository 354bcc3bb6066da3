"""What `adapters/transformers` needs of transformers."""

from __future__ import annotations

from inferscope.adapters.needs.feature import Engine, Feature, Fields, Place

_MIXIN = "transformers.generation.utils:GenerationMixin"
_MODEL = "transformers.modeling_utils:PreTrainedModel"
_BATCHING = "transformers.generation.continuous_batching"
_PROCESSOR = f"{_BATCHING}.continuous_api:ContinuousBatchProcessor"
_MANAGER = f"{_BATCHING}.continuous_api:ContinuousBatchingManager"
_ROUTER = f"{_BATCHING}.continuous_api:OutputRouter"
_STATUS = f"{_BATCHING}.continuous_api:BackgroundThreadStatus"
_SCHEDULER = f"{_BATCHING}.scheduler:Scheduler"
_RUNNER = f"{_BATCHING}.model_runner:ModelRunner"
_INPUTS = f"{_BATCHING}.input_outputs"
_SERVING = "transformers.cli.serving"
_JOINED = ("model", "processor", "inputs", "gen_config", "request_id")

TRANSFORMERS = Engine(
    "transformers",
    "transformers",
    "inferscope.observe(model) in your script, or inferscope run -- CMD",
    (
        Feature(
            "generate",
            (
                Place(f"{_MIXIN}.generate"),
                Place(f"{_MIXIN}._sample"),
                Place(f"{_MIXIN}.prepare_inputs_for_generation"),
                Place(f"{_MIXIN}._update_model_kwargs_for_generation"),
                Place(f"{_MIXIN}._has_unfinished_sequences"),
            ),
            is_needed=True,
        ),
        Feature("assisted decoding", (Place(f"{_MIXIN}._assisted_decoding"),)),
        Feature("compiled steps of generate", (Place(f"{_MODEL}.get_compiled_call"),)),
        Feature(
            "continuous batching",
            (
                Place(f"{_PROCESSOR}.prepare_next_batch", is_open=False),
                Place(f"{_PROCESSOR}.update_batch", is_open=False),
                Place(f"{_SCHEDULER}.add_waiting_request", ("state",), is_open=False),
                Place(f"{_SCHEDULER}.clear_cancelled_requests", is_open=False),
                Place(f"{_RUNNER}.compute_batch"),
                Place(
                    f"{_INPUTS}:ContinuousBatchingIOs.prepare_batch_tensors",
                    ("requests_in_batch",),
                ),
                Place(
                    f"{_INPUTS}:ContinuousBatchingAsyncIOs.prepare_batch_tensors",
                    ("requests_in_batch",),
                ),
                Place(f"{_MANAGER}._run_generation_loop"),
                Place(f"{_MANAGER}._create_batch_processor", is_open=False),
            ),
        ),
        Feature(
            "continuous batching",
            (Place(f"{_ROUTER}.fail_and_deliver", ("state", "error"), is_open=False),),
            otherwise=(
                Place(f"{_PROCESSOR}._handle_request_error", ("error", "state"), is_open=False),
            ),
        ),
        Feature(
            "tokens when they are delivered",
            (Place(f"{_ROUTER}.deliver_batch", ("outputs",), is_open=False),),
        ),
        Feature("pauses", (Place(f"{_STATUS}.pause_and_wait", is_open=False),)),
        Feature(
            "requests of transformers serve",
            (
                Place(f"{_SERVING}.server:build_server"),
                Place(f"{_SERVING}.utils:GenerateManager.generate_streaming", _JOINED),
                Place(f"{_SERVING}.utils:GenerateManager.generate_non_streaming", _JOINED),
                Place(f"{_SERVING}.utils:CBGenerateManager.generate_streaming", _JOINED),
                Place(f"{_SERVING}.utils:CBGenerateManager.generate_non_streaming", _JOINED),
                Place(f"{_SERVING}.utils:DirectStreamer.put"),
                Place(f"{_SERVING}.utils:CBStreamer.put", ("output",), is_open=False),
            ),
            (Fields(f"{_SERVING}.utils:DirectStreamer", ("_loop", "total_tokens")),),
        ),
    ),
)
