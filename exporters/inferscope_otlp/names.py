"""Strings in traces: the conventions' names, the engines', and ours.

The GenAI conventions are still in development and have moved once, so they are written out here and
nothing imports OpenTelemetry's `_incubating` modules: a rename is one line of this file.
"""

from __future__ import annotations

SCOPE = "inferscope"

# --- spans and events -------------------------------------------------------------------------

SPAN_QUEUE = "inferscope.queue"
SPAN_PREFILL = "inferscope.prefill"
SPAN_DECODE = "inferscope.decode"
SPAN_PREEMPTED = "inferscope.preempted"
SPAN_KV_TRANSFER = "inferscope.kv_transfer"
EVENT_CHUNK = "inferscope.prefill.chunk"

# --- resource ---------------------------------------------------------------------------------

SERVICE_NAME = "service.name"
SERVICE_INSTANCE_ID = "service.instance.id"
HOST_NAME = "host.name"
HW_ID = "hw.id"
HW_NAME = "hw.name"
HW_TYPE = "hw.type"
ENGINE_VERSION = "inferscope.engine.version"
SYNTHETIC = "inferscope.synthetic"

# --- semantic conventions ---------------------------------------------------------------------

OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
CONVERSATION_ID = "gen_ai.conversation.id"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
ERROR_TYPE = "error.type"

METRIC_DURATION = "gen_ai.server.request.duration"
METRIC_TTFT = "gen_ai.server.time_to_first_token"
METRIC_TPOT = "gen_ai.server.time_per_output_token"

METRIC_GPU_UTILIZATION = "hw.gpu.utilization"
"""Without `hw.gpu.task`, whose encoder and decoder are those of video."""
METRIC_GPU_MEMORY_USAGE = "hw.gpu.memory.usage"
METRIC_GPU_MEMORY_LIMIT = "hw.gpu.memory.limit"
METRIC_GPU_MEMORY_UTILIZATION = "hw.gpu.memory.utilization"
METRIC_HW_POWER = "hw.power"
METRIC_HW_ERRORS = "hw.errors"

OPERATION_OF_ENDPOINT = {
    "chat/completions": "chat",
    "chat": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}
"""Operation by the end of the endpoint's path; the first match counts."""
DEFAULT_OPERATION = "text_completion"
"""Operation of a request whose endpoint is not recorded."""

# --- the engines' own names, for dashboards built on their traces ------------------------------

REQUEST_ID_OF_ENGINES = "gen_ai.request.id"
LATENCY_QUEUE = "gen_ai.latency.time_in_queue"
LATENCY_TTFT = "gen_ai.latency.time_to_first_token"
LATENCY_E2E = "gen_ai.latency.e2e"
LATENCY_PREFILL = "gen_ai.latency.time_in_model_prefill"
LATENCY_DECODE = "gen_ai.latency.time_in_model_decode"
LATENCY_INFERENCE = "gen_ai.latency.time_in_model_inference"

# --- ours -------------------------------------------------------------------------------------

REQUEST_ID = "inferscope.request.id"
EXTERNAL_ID = "inferscope.request.external_id"
TENANT = "inferscope.request.tenant"
PRIORITY = "inferscope.request.priority"
ADAPTER = "inferscope.request.adapter"
ENDPOINT = "inferscope.request.endpoint"
FINISH = "inferscope.finish"
ARRIVED_AT = "inferscope.arrived_at"
DELIVERED_AT = "inferscope.delivered_at"
JOINED_LATE = "inferscope.joined_late"
LEDGER_MISSING = "inferscope.ledger_missing"
PREEMPTIONS = "inferscope.preemptions"
LEDGER = "inferscope.ledger."
"""Prefix of a cause."""
SLO = "inferscope.slo."
"""Prefix of ttft, tbt or goodput, or of the name of a collector's objective."""
SLO_CAUSE = "inferscope.slo.cause"
METHOD = "inferscope.attribution.method"
CLOCK = "inferscope.attribution.clock"
UNCERTAINTY = "inferscope.attribution.uncertainty"
BLAMED_REQUESTS = "inferscope.blame.requests"
BLAMED_SECONDS = "inferscope.blame.seconds"
PHASE = "inferscope.phase"
GPU_SECONDS = "inferscope.gpu.seconds"
SM_ACTIVE = "inferscope.gpu.sm_active"
"""Seconds; divided by `inferscope.gpu.seconds` it is the SM utilization."""
HBM_READ_BYTES = "inferscope.gpu.hbm.read_bytes"
HBM_WRITE_BYTES = "inferscope.gpu.hbm.write_bytes"
ENERGY = "inferscope.energy.joules"
COUNTERS_METHOD = "inferscope.counters.method."
COUNTERS_ERROR = "inferscope.counters.error."
"""Prefix of a counter's name."""
FLOPS = "inferscope.flops"
STEPS = "inferscope.steps"
BATCH_SIZE_MEAN = "inferscope.batch.size_mean"
BATCH_TOKENS_MEAN = "inferscope.batch.tokens_mean"
INTERFERENCE = "inferscope.interference.seconds"
TRANSFER_BYTES = "inferscope.transfer.bytes"
TRANSFER_PEER = "inferscope.transfer.peer"
NUM_CHUNKS = "inferscope.prefill.chunks"
TBT_P50 = "inferscope.tbt.p50"
TBT_P99 = "inferscope.tbt.p99"
TBT_MAX = "inferscope.tbt.max"
CHUNK_TOKENS = "inferscope.chunk.tokens"
CHUNK_CONTEXT = "inferscope.chunk.context_tokens"
CHUNK_DURATION = "inferscope.chunk.duration"
CHUNK_RECOMPUTED = "inferscope.chunk.recomputed"

UNIQUE = frozenset({RESPONSE_ID, REQUEST_ID_OF_ENGINES, REQUEST_ID, EXTERNAL_ID})
"""Attributes whose value differs in each trace."""
