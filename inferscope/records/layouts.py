"""Record types and their vocabulary, and the encoding of records.

An observed process sends only these records to readers. They state facts and nothing derived. A
record is a msgpack array (fields by position): a reader ignores fields appended by a newer writer
and fills in defaults for fields that an older writer lacks, so new fields go at the end, with a
default. Columns are little-endian bytes of a fixed dtype (`COLUMNS`), written with `array` and read
with `numpy.frombuffer`; lists cost five times as much.

Codes stay plain integers, so that readers preserve unknown ones.

Times are integer nanoseconds of CLOCK_MONOTONIC. The first field, `t_ns`, is the time at which the
record was written; it never decreases within a ring.
"""

from __future__ import annotations

from typing import ClassVar, Literal, NewType

import msgspec

FORMAT_VERSION = 2
"""Version of rings and recordings: frames, header page, blocks, and record types that a reader
cannot skip without losing steps (2: `StepSame`)."""
FOLD_VERSION = 12
"""Version of the records' semantics: two folds of one version give the same numbers."""

RequestIndex = NewType("RequestIndex", int)
"""Number of a request, unique for the lifetime of its ring."""

# --- phases -----------------------------------------------------------------------------------

PREFILL, DECODE, VERIFY, DRAFT = range(4)
PHASES = ("prefill", "decode", "verify", "draft")

RECOMPUTED = 1
"""Slice flag: these tokens were computed before and lost to a preemption."""
LAST_CHUNK = 2
"""Slice flag: the prompt is complete after this slice."""

DEVICE_SECONDS = (
    "prefill",
    "decode",
    "padding",
    "unattributed",
    "foreign",
    "idle_no_work",
    "idle_host_gap",
)
"""States of a device, whose durations sum to its wall time."""

# --- request events ---------------------------------------------------------------------------

(
    RECEIVED,
    TOKENISED,
    QUEUED,
    ADMITTED,
    PREEMPTED,
    RESUMED,
    FIRST_BYTE,
    LAST_BYTE,
    FINISHED,
) = range(9)
EVENTS = (
    "received",
    "tokenised",
    "queued",
    "admitted",
    "preempted",
    "resumed",
    "first_byte",
    "last_byte",
    "finished",
)

FINISHES = (
    "stop",
    "length",
    "client_cancel",
    "timeout",
    "server_abort",
    "rejected",
    "error",
    "engine_lost",
    "shed",
)
"""Reasons why a request ends. Only readers set `engine_lost`. `rejected` is the client's error
(most HTTP 4xx); `shed` is a refusal for lack of capacity (429, 503)."""


def finish_of_status(status: int) -> str:
    """Return the finish reason of a request refused with an HTTP status."""
    if status in (429, 503):
        return "shed"
    return "error" if status >= 500 else "rejected"


OTHER_PART = "other"
"""Name of the prompt tokens that no declared part covers."""

Binding = Literal["none", "slots", "blocks", "budget"]
"""Limit that kept the scheduler from admitting another request."""
BINDINGS: tuple[Binding, ...] = ("none", "slots", "blocks", "budget")
"""All values of `Binding`, in the order of their codes in `StepSame`."""

WAITING, RUNNING, HELD = range(3)
"""States in `Live`; a `HELD` request is preempted and waits to resume."""

ON, OFF, FAILED, OVER_BUDGET, CLOSED, UNSUPPORTED = range(6)
PROBE_STATES = ("on", "off", "failed", "over_budget", "closed", "unsupported")

LOOKUP_CLASSES = (
    "hit",
    "off",
    "cleared",
    "evicted",
    "pending",
    "unmatched",
    "rule",
    "rounding",
)
"""Fields of `CacheLookup` that sum to the prompt's tokens, in the order of the prompt.

Evicted, pending and cleared blocks may alternate; they always lie between `hit` and `unmatched`."""

SALT, LORA, MULTIMODAL = 1, 2, 4
"""Bits of `PromptLikeness.differs`."""

# --- columns ----------------------------------------------------------------------------------

COLUMNS: dict[str, str] = {
    "requests": "<u4",
    "phases": "u1",
    "tokens": "<u4",
    "contexts": "<u4",
    "flags": "u1",
    "sampled": "<u2",
    "proposed": "<u2",
    "accepted": "<u2",
    "preempted": "<u4",
    "states": "u1",
    "prompt_tokens": "<u4",
    "cached_tokens": "<u4",
    "arrived_ns": "<i8",
    "starts_ns": "<i8",
    "ends_ns": "<i8",
    "series": "<f4",
    "blocked_ns": "<i8",
    "digests": "<u8",
    "experts": "<u4",
    "busiest": "<u4",
    "busiest_experts": "<u2",
}
"""Numpy dtype of every column, by field name. An empty column with rows means all zeros."""


class Record(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Base of all records; `CODE` is its frame type and is never reused."""

    CODE: ClassVar[int]

    t_ns: int


class Shape(msgspec.Struct, frozen=True, array_like=True):
    """Model dimensions for the cost model; `weight_bits` and `kv_bits` are per element."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    weight_bits: int
    kv_bits: int
    activation_bits: int
    tied: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    num_shared_experts: int = 0
    window_tokens: int = 0
    latent_ranks: tuple[int, int] | None = None
    """Ranks of multi-head latent attention: query, key-value."""
    num_full_layers: int = 0
    """Number of layers with full attention among layers with a window."""
    head_bits: int = 0
    """Bits per element of lm_head and the embedding; 0 if like the other weights."""
    num_shared_gates: int = 0
    """Number of router outputs that weight the shared experts."""


class EngineInfo(Record, frozen=True, gc=False, array_like=True):
    """Description of an engine. Unknown strings are empty, unknown numbers 0."""

    CODE: ClassVar[int] = 2

    engine: str
    version: str = ""
    model: str = ""
    served_name: str = ""
    revision: str = ""
    shape: Shape | None = None
    device: str = ""
    device_uuid: str = ""
    mig_uuid: str = ""
    ranks: tuple[int, int, int, int] = (0, 0, 0, 0)
    """This process's tensor, pipeline, data and expert rank."""
    sizes: tuple[int, int, int, int] = (1, 1, 1, 1)
    role: str = "both"
    """Role in disaggregated serving: prefill, decode or both."""
    max_running: int = 0
    token_budget: int = 0
    block_tokens: int = 0
    num_blocks: int = 0
    options_hash: str = ""
    num_threads: int = 0
    """Number of computing threads on a CPU."""


class Keyframe(Record, frozen=True, gc=False, array_like=True):
    """Start of a keyframe: EngineInfo, CostTable, Live and a final Clock restate all state.

    With more than 512 requests in flight, other records are interleaved with the Live ones, before
    the Clock. A Clock with `device_ns` is not part of the keyframe.
    """

    CODE: ClassVar[int] = 1

    state: int
    """One of `PROBE_STATES`."""
    previous_position: int
    """Position of the preceding keyframe in the ring, -1 for none, for readers that walk back."""
    paused_ns: int | None = None
    """Start of the engine's pause; None if it is not paused or the state is unknown."""


class StepPlan(Record, frozen=True, gc=False, array_like=True):
    """A scheduler's decision for one step, and its binding limit."""

    CODE: ClassVar[int] = 3

    step: int
    start_ns: int
    end_ns: int
    waiting: int
    running: int
    blocks_used: int
    blocks_cached: int
    blocks_total: int
    preempted: bytes = b""
    binding: str = "none"


class StepSlices(Record, frozen=True, gc=False, array_like=True):
    """The requests' slices of a step: one row per (request, phase) segment."""

    CODE: ClassVar[int] = 4

    step: int
    digest: int
    requests: bytes
    phases: bytes
    tokens: bytes
    contexts: bytes
    flags: bytes = b""
    sampled: bytes = b""
    proposed: bytes = b""
    accepted: bytes = b""

    @property
    def is_plain_decode(self) -> bool:
        """Return whether each row decodes one token from one row of logits, without drafts."""
        num = len(self.phases)
        return (
            num > 0
            and self.phases == _DECODES * num
            and self.tokens == _ONE_TOKEN * num
            and self.sampled == _ONE_ROW * num
            and len(self.requests) == len(self.contexts) == 4 * num
            and self.flags in (b"", bytes(num))
            and not (self.proposed or self.accepted)
        )


_DECODES = bytes((DECODE,))
_ONE_TOKEN, _ONE_ROW = b"\1\0\0\0", b"\1\0"


class StepSame(Record, frozen=True, gc=False, array_like=True):
    """A step with the same rows as the ring's last StepSlices, all plain decodes.

    Each row has computed one token in every step since: its context is that of the StepSlices plus
    the difference of the two step numbers. A reader without the frame that `frames_back` refers to
    cannot know the rows of this step.

    It replaces StepPlan, StepSlices and an earlier step's Emitted, in 60 bytes for any batch.
    """

    CODE: ClassVar[int] = 13

    step: int
    frames_back: int
    """Distance from this frame back to that of the StepSlices, in sequence numbers."""
    start_ns: int
    """Start of the scheduling; its end follows from `took_ns`."""
    took_ns: int
    waiting: int
    running: int
    blocks_used: int
    blocks_cached: int
    blocks_total: int
    binding: int = 0
    """Index in `BINDINGS`."""
    emitted_back: int = 0
    """Number of steps back to a step with the same rows, each of which emitted one token; 0 for
    none."""
    emitted_before_ns: int = 0
    """Nanoseconds from the emission of these tokens to `start_ns`."""


class StepSpan(Record, frozen=True, gc=False, array_like=True):
    """Execution time of a step on one rank."""

    CODE: ClassVar[int] = 5

    step: int
    digest: int
    """Digest of the slices; 0 if this rank cannot know them."""
    launch_start_ns: int
    launch_end_ns: int
    ready_ns: int
    device_start_ns: int | None = None
    """Raw device time since the probe's first anchor, in nanoseconds; see `Clock`."""
    device_end_ns: int | None = None
    waits_ns: tuple[int, ...] = ()
    """Times within the span that this rank waited for others, in collectives; none of its own."""
    mode: str = "eager"
    padded_tokens: int = 0
    cold: bool = False
    dummy: bool = False
    overlapped: bool = False
    prefill_tokens: int | None = None
    """Number of prefill tokens on a rank whose slices another process reports; None if unknown.
    If that process is on another host, the fold here knows nothing else of the step's phases."""
    decode_tokens: int = 0
    """Number of decode tokens on such a rank."""


class Emitted(Record, frozen=True, gc=False, array_like=True):
    """An emission of tokens by the engine loop, or (from a front end) their delivery.

    The time is `at_ns`; it is `t_ns` if that is None or later.
    """

    CODE: ClassVar[int] = 6

    requests: bytes
    tokens: bytes
    step: int = -1
    at_ns: int | None = None
    blocked_ns: bytes = b""
    """Nanoseconds per request, from a front end, during which its connection blocked before
    delivery. A row without tokens reports only that."""

    @property
    def left_ns(self) -> int:
        """Return the time of emission, at most `t_ns` even in a damaged record."""
        at_ns = self.at_ns
        return self.t_ns if at_ns is None or not 0 <= at_ns <= self.t_ns else at_ns


class RequestEvent(Record, frozen=True, gc=False, array_like=True):
    """A state change of a request; only the fields of its kind are set."""

    CODE: ClassVar[int] = 7

    index: int
    kind: int
    at_ns: int
    request_id: str = ""
    """The engine's own ID, on the first event of each ring: the key that joins rings."""
    external_id: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    reason: str = ""
    parent: str = ""
    trace: str = ""
    """W3C `traceparent` as received."""
    attributes: dict[str, str] | None = None
    prompt_parts: tuple[tuple[str, int], ...] = ()
    """Names and token counts of parts in prompt order, as declared by client or server."""
    reasoning_tokens: int | None = None
    """Number of reasoning tokens in the output; None if the engine does not separate them."""
    adapter: str = ""
    prefix_digests: tuple[int, ...] = ()
    """Not written any more: `PromptLikeness` compares whole prompts."""


class Live(Record, frozen=True, gc=False, array_like=True):
    """All requests in flight, for readers that start late."""

    CODE: ClassVar[int] = 8

    requests: bytes
    states: bytes
    prompt_tokens: bytes
    cached_tokens: bytes
    arrived_ns: bytes
    request_ids: tuple[str, ...]


class Clock(Record, frozen=True, gc=False, array_like=True):
    """Simultaneous clock readings at `host_ns` (at `t_ns` if that is None)."""

    CODE: ClassVar[int] = 9

    real_ns: int
    device_ns: int | None = None
    """Device time within `error_ns`; if None, the reading is of `real_ns`."""
    error_ns: int | None = None
    host_ns: int | None = None

    @property
    def at_ns(self) -> int:
        """Return the host time of the readings."""
        return self.t_ns if self.host_ns is None else self.host_ns


class ProbeHealth(Record, frozen=True, gc=False, array_like=True):
    """A probe's report on its own cost and losses."""

    CODE: ClassVar[int] = 10

    state: int
    frames: int
    errors: int
    cost_ns: int
    """Nanoseconds spent in the probe on the engine's thread since it opened."""
    complete_through_ns: int
    """Time before which every started step has its span in the ring."""
    dropped: int = 0
    message: str = ""
    odd_values: int = 0
    """Number of arguments that no record can hold: clamped, cut, or omitted."""
    lost_calls: int = 0
    """Number of calls omitted because the probe was busy or memory was exhausted."""
    unsupported: tuple[str, ...] = ()
    """Features of this process's engine that the probe cannot observe, with the reason."""
    hidden_ns: int = 0
    """Part of `cost_ns` spent while the device computed, which delayed no step."""


class CounterSample(Record, frozen=True, gc=False, array_like=True):
    """Hardware counters over one window.

    Without values, it reports the state of the source: `facts` after it opened a device, `reason`
    after it stopped. The sampler's keyframes restate it.
    """

    CODE: ClassVar[int] = 11

    device_uuid: str
    """UUID as the vendor writes it, per MIG instance; empty for the host or the source itself."""
    start_ns: int
    end_ns: int
    source: str
    values: dict[str, float]
    """Values by counter name (`COUNTERS`); those the source cannot read are absent."""
    facts: dict[str, str] = {}
    reason: str = ""
    """Reason why the source stopped, and the remedy."""
    starts_ns: bytes = b""
    """Starts of the short windows within this one, if the source has such."""
    ends_ns: bytes = b""
    series: dict[str, bytes] = {}
    """Values of those windows: one column per counter in `values`."""
    real_offset_ns: int | None = None
    """Nanoseconds subtracted from wall-clock stamps to get monotonic time; None if unneeded.

    Readers restore the stamps with it and map them by the anchors in the ring's `Clock` records: a
    constant offset is wrong if the wall clock was set in between.
    """


class Transfer(Record, frozen=True, gc=False, array_like=True):
    """A transfer of a request's KV blocks between workers, reported by the one that waited."""

    CODE: ClassVar[int] = 12

    index: int
    num_bytes: int
    start_ns: int
    end_ns: int
    peer: str
    """Engine ID of the other worker if known, else its address."""
    peer_request_id: str = ""
    """Request ID in the other engine; `peer` is then that engine's ID."""


class CacheLookup(Record, frozen=True, gc=False, array_like=True):
    """Outcome of the prefix cache for one request, at its first admission.

    The token counts sum to the prompt. Token ids, texts and the engine's hashes are not recorded.
    """

    CODE: ClassVar[int] = 14

    index: int
    hit: int = 0
    """Tokens taken from the cache."""
    off: int = 0
    """Tokens that were not looked up: the cache is disabled, or not for this request."""
    cleared: int = 0
    """Tokens that a reset of the cache removed."""
    evicted: int = 0
    """Tokens that were cached, and evicted to make room."""
    pending: int = 0
    """Tokens that another request's unfinished prefill is computing."""
    rounding: int = 0
    """Tokens behind the prompt's last whole block."""
    rule: int = 0
    """Tokens of whole blocks that the engine always computes: the prompt's last token at least."""
    unmatched: int = 0
    """Tokens without any of these causes: what is new, differs, or is in another namespace.
    `PromptLikeness` says which."""
    evictor: int = -1
    """Index of the request for which the first evicted block made room; -1 if unknown."""
    evicted_ns: int | None = None
    """Time of that eviction, or of the reset if only cleared tokens are missing."""
    twin: int = -1
    """Index of the request whose prefill the pending tokens are part of; -1 for none."""
    num_evictors: int = 0
    """Number of requests that may be the evictor, if `is_inferred`."""
    is_inferred: bool = False
    """Whether evictions were derived from what was cached earlier, not seen block by block.

    Lost tokens are then counted in keys of 32 tokens: `unmatched` may begin with up to 31 more."""
    off_reason: str = ""
    """Reason why `off` tokens were not looked up."""
    evictors: tuple[int, ...] = ()
    """Indices of the likeliest evictors, `evictor` first, if `is_inferred`; at most 8."""


class PromptLikeness(Record, frozen=True, gc=False, array_like=True):
    """Comparison of a prompt with earlier ones of the same process: positions only.

    It is independent of the cache. A request without this record begins like no earlier prompt.
    """

    CODE: ClassVar[int] = 15

    index: int
    earlier: int
    """Index of the most similar earlier request of this ring."""
    diverged_at: int
    """Number of first tokens equal to those of the earlier prompt."""
    equal_again_at: int | None = None
    """Position behind `diverged_at` from which the earlier prompt's text goes on; None if none."""
    shift: int = 0
    """Position there minus the position in the earlier prompt."""
    spans: tuple[tuple[int, int], ...] = ()
    """Start and end of the longest spans behind `diverged_at` that any earlier prompt holds, at
    most 8, in order."""
    differs: int = 0
    """Bits of what separates the two requests' caches: SALT, LORA, MULTIMODAL."""


class CacheSample(Record, frozen=True, gc=False, array_like=True):
    """Keyed digests of a sample of a prompt's blocks, for the miss-ratio curve.

    A block is in the sample if its digest is below `rate * 2**64`, so a reader can thin the sample
    further. The key is made at the engine's start and is written nowhere. The rate only falls.
    """

    CODE: ClassVar[int] = 16

    index: int
    block_tokens: int
    num_blocks: int
    """Number of the prompt's blocks that the cache could have held, sampled or not."""
    rate: float
    """Share of all blocks that is sampled."""
    digests: bytes = b""
    """Digests in the order of the prompt; each covers its block and everything before it."""


class ExpertLoad(Record, frozen=True, gc=False, array_like=True):
    """Numbers of tokens that a step routed to the experts of a mixture.

    Sums over steps are exact. The size is that of one column of experts and two of layers, not of
    their product.
    """

    CODE: ClassVar[int] = 17

    step: int
    tokens: int
    """Number of tokens computed; each layer routes each of them to `per_token` experts."""
    per_token: int
    experts: bytes
    """Number of tokens routed to each expert, summed over the layers."""
    busiest: bytes
    """Number of tokens routed to the busiest expert of each layer."""
    busiest_experts: bytes
    """Index of the busiest expert of each layer."""
    first_layer: int = 0
    """Index of the first of these layers, on a later pipeline stage."""


CALIBRATION = "calibration"
"""Source of a CostTable measured on this device."""


class CostTable(Record, frozen=True, gc=False, array_like=True):
    """Device rates known before the first step; see `inferscope.cost.table`.

    An engine's keyframes restate it. If they do not, a reader on the engine's host inserts it after
    each description of the engine in what it folds and records (`collector.calibrated`).
    """

    CODE: ClassVar[int] = 33

    fit_id: str
    mode: str
    """Execution mode; empty for all."""
    source: str
    """calibration."""
    coefficients: dict[str, float]


# --- written by readers -----------------------------------------------------------------------


class Tick(Record, frozen=True, gc=False, array_like=True):
    """The fold's only clock, once per `TICK_NS` of monotonic time: deadlines expire here."""

    CODE: ClassVar[int] = 32

    real_ns: int


TICK_NS = 200_000_000


class RingOpened(Record, frozen=True, gc=False, array_like=True):
    """Assignment of a ring's number within a recording."""

    CODE: ClassVar[int] = 34

    ring: int
    engine_id: str
    role: str
    rank: int
    pid: int
    host: str
    boot_id: str
    start_ns: int
    start_real_ns: int
    synthetic: bool = False
    skew_ns: int = 0
    """Nanoseconds that the reader added to all times of the ring, whose process has another
    monotonic clock, in its own time namespace."""


class Missed(Record, frozen=True, gc=False, array_like=True):
    """Frames that the reader did not see, with the reason."""

    CODE: ClassVar[int] = 35

    ring: int
    num_frames: int
    reason: str
    """Reason of the loss: lapped or damaged."""


RECORD_TYPES: tuple[type[Record], ...] = (
    Keyframe,
    EngineInfo,
    StepPlan,
    StepSlices,
    StepSame,
    StepSpan,
    Emitted,
    RequestEvent,
    Live,
    Clock,
    ProbeHealth,
    CounterSample,
    Transfer,
    CacheLookup,
    PromptLikeness,
    CacheSample,
    ExpertLoad,
    Tick,
    CostTable,
    RingOpened,
    Missed,
)

_KIND_OF_CODE = {kind.CODE: kind for kind in RECORD_TYPES}
_DECODERS: dict[int, msgspec.msgpack.Decoder[Record]] = {}
"""Decoders by frame type, created on first use: pure writers need none."""
_ENCODER = msgspec.msgpack.Encoder()

encode = _ENCODER.encode
"""Encode a record as a frame's payload."""


class UnknownRecord(ValueError):
    """A frame whose type or content this version cannot read."""


def decode(code: int, payload: bytes | memoryview) -> Record:
    """Decode a frame's payload.

    Raises:
        UnknownRecord: this version does not know the type, or the payload does not fit it.
    """
    decoder = _DECODERS.get(code)
    if decoder is None:
        if code not in _KIND_OF_CODE:
            raise UnknownRecord(f"record type {code} is not known to format {FORMAT_VERSION}")
        decoder = _DECODERS[code] = msgspec.msgpack.Decoder(_KIND_OF_CODE[code])
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnknownRecord(f"record type {code} cannot be read: {error}") from error
