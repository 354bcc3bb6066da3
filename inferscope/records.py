"""The vocabulary: record types, phases, causes, and how a record becomes bytes.

Everything that crosses from an observed process to a reader is one of these records. They state
facts and nothing derived. A record is a msgpack array (fields by position), so a reader ignores
fields a newer writer appended, and fills in the defaults of fields an older writer never had: new
fields go at the end, with a default. Columns are little-endian bytes of a fixed dtype (`COLUMNS`),
written with `array` and read with `numpy.frombuffer`; lists cost five times as much.

Codes stay plain integers, so that an unknown one survives the reading of it.

Time is integer nanoseconds of CLOCK_MONOTONIC; `t_ns`, always first, is when the record was
written, and never decreases within a ring.
"""

from __future__ import annotations

from typing import ClassVar, Literal, NewType

import msgspec

FORMAT_VERSION = 2
"""Version of rings and recordings: frames, header page, blocks, and record types that a reader
cannot skip without losing steps (2: `StepSame`)."""
FOLD_VERSION = 9
"""Of the meaning of the records: two folds of one version give the same numbers."""

RequestIndex = NewType("RequestIndex", int)
"""A request within its ring, unique for the ring's lifetime."""

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
"""Where a device's wall time goes; they sum to it."""

# --- causes -----------------------------------------------------------------------------------

CAUSES = (
    "upstream",
    "frontend",
    "encode",
    "queue",
    "queue_idle",
    "kv_load",
    "prefill_own",
    "prefill_co_batched",
    "prefill_interference",
    "decode_own",
    "decode_co_batched",
    "decode_interference",
    "draft",
    "rank_wait",
    "slowdown",
    "cold_start",
    "cpu_gap",
    "not_scheduled",
    "preempted",
    "recompute",
    "kv_transfer",
    "paused",
    "engine_lost",
    "output",
    "delivery",
)
"""The closed list of reasons why a request's clock was running."""

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
"""How a request can end. `engine_lost` is set by readers only. `rejected` is the client's error
(most of HTTP's 4xx); `shed` was refused for want of capacity (429, 503)."""


def finish_of_status(status: int) -> str:
    """Return how a request ended that was refused with an HTTP error."""
    if status in (429, 503):
        return "shed"
    return "error" if status >= 500 else "rejected"


OTHER_PART = "other"
"""Tokens of a prompt of which nobody said whose they are."""
PREFIX_TOKENS = (64, 256, 1024)
"""Lengths at which the beginning of a prompt is compared with others'."""

Binding = Literal["none", "slots", "blocks", "budget"]
"""What kept the scheduler from admitting one more request."""
BINDINGS: tuple[Binding, ...] = ("none", "slots", "blocks", "budget")
"""The same, in the order of their codes in `StepSame`."""

WAITING, RUNNING, HELD = range(3)
"""States in `Live`; `HELD` is preempted, waiting to be resumed."""

ON, OFF, FAILED, OVER_BUDGET, CLOSED, UNSUPPORTED = range(6)
PROBE_STATES = ("on", "off", "failed", "over_budget", "closed", "unsupported")

# --- counters ---------------------------------------------------------------------------------

SAMPLER_ROLE = "sampler"
"""Of a ring that holds what devices count. It belongs to no engine."""

COUNTERS: dict[str, str] = {
    "busy_share": "of the window, with any kernel or copy on the device",
    "sm_active_share": "of the window, mean over the SMs, with a warp resident",
    "sm_occupancy_share": "of the warps that could be resident, mean over window and SMs",
    "tensor_share": "of the tensor pipes' cycles",
    "dram_share": "of the device memory's peak rate",
    "dram_peak_bytes_per_s": "that this share is of",
    "dram_read_bytes": "amount",
    "dram_write_bytes": "amount",
    "l2_sectors": "amount: sectors of 32 bytes that the L2 cache looked up",
    "pcie_read_bytes": "amount, as the device counts them",
    "pcie_write_bytes": "amount, as the device counts them",
    "nvlink_receive_bytes": "amount",
    "nvlink_send_bytes": "amount",
    "copy_share": "of the window, with the memory interface busy (NVML's memory utilisation)",
    "energy_uj": "amount",
    "power_w": "of the whole board, as the driver averages it",
    "power_limit_w": "that the driver holds the board to",
    "sm_clock_mhz": "at the end of the window",
    "memory_clock_mhz": "at the end of the window",
    "gpc_clock_mhz": "mean over the window, of the clock that the SMs run by",
    "sys_clock_mhz": "mean over the window, of the device's system clock",
    "dram_clock_mhz": "mean over the window, of the memory's clock",
    "temperature_c": "at the end of the window",
    "throttle_bits": "why clocks are held down: the driver's bits, `THROTTLES`",
    "xid": "the driver's code for an error of the device within the window",
    "memory_used_bytes": "level",
    "memory_total_bytes": "level",
    "num_processes": "that hold a context on the device",
    "num_foreign": "of them, that belong to no engine seen here",
    "foreign_memory_bytes": "that those hold",
    "foreign_busy_share": "of the window, with kernels of those",
    "pid": "the process that the sample is of, in the sampler's namespace",
    "cpu_ns": "amount: of processor time, over all threads of the process",
    "run_wait_ns": "amount: busy threads of the process ready to run, waiting for a CPU, summed",
    "quota_ns": "amount: the process's control group held back by its CPU quota",
    "host_busy_ns": "amount: CPU time in use, over all CPUs of the host",
    "steal_ns": "amount: CPU time that the hypervisor gave to other machines, over all CPUs",
    "num_cpus": "of the host",
    "rss_bytes": "level: resident memory of the process",
    "num_threads": "level",
    "num_dropped": "amount: windows that the source lost",
}
"""What a sample may tell. Shares are 0..1 of the window; amounts add up over windows."""

AMOUNTS = frozenset(
    (
        "dram_read_bytes", "dram_write_bytes", "l2_sectors", "pcie_read_bytes", "pcie_write_bytes",
        "nvlink_receive_bytes", "nvlink_send_bytes", "energy_uj", "cpu_ns", "run_wait_ns",
        "quota_ns", "host_busy_ns", "steal_ns", "num_dropped",
    )
)  # fmt: skip

THROTTLES: dict[int, str] = {
    0x1: "idle",
    0x2: "application_clocks",
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
    0x100: "display_clocks",
}
"""NVML's clocks event reasons, by bit."""
IDLE_CLOCKS = 0x1
"""The one of them that holds nobody back: there is nothing to do."""

XIDS: dict[int, str] = {
    13: "graphics_exception",
    31: "memory_page_fault",
    43: "stopped_processing",
    45: "preemptive_cleanup",
    48: "double_bit_ecc",
    61: "microcontroller_breakpoint",
    62: "microcontroller_halt",
    63: "row_remapping",
    64: "row_remapping_failure",
    69: "graphics_class_error",
    74: "nvlink",
    79: "fallen_off_the_bus",
    92: "high_single_bit_ecc",
    94: "contained_ecc",
    95: "uncontained_ecc",
    119: "gsp_timeout",
    120: "gsp_error",
}
"""The driver's codes of a device's errors that matter to who serves on it; there are others.

https://docs.nvidia.com/deploy/xid-errors/
"""


def xid_word(code: int) -> str:
    """Return what an error is called, `xid_N` where it has no word here."""
    return XIDS.get(code, f"xid_{code}")


def throttle_words(bits: int) -> list[str]:
    """Return the reasons that a driver's bits name, `bit_N` for those without a word here."""
    held = bits & ~IDLE_CLOCKS
    places = [1 << at for at in range(held.bit_length()) if held >> at & 1]
    return [THROTTLES.get(bit, f"bit_{bit.bit_length() - 1}") for bit in places]


def plain_uuid(device_uuid: str) -> str:
    """Return a device's id without its vendor's prefix: torch leaves that out, NVML does not."""
    return device_uuid.removeprefix("GPU-").lower()


_UUID_CHARS, _UUID_DASHES = 36, 4


def driver_uuid(device_uuid: str) -> str:
    """Return a GPU's id as its driver writes it, and with it dcgm-exporter."""
    is_bare = len(device_uuid) == _UUID_CHARS and device_uuid.count("-") == _UUID_DASHES
    return f"GPU-{device_uuid.lower()}" if is_bare else device_uuid


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
}
"""numpy dtype of every column, by field name. An empty column where rows exist means all zero."""


class Record(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Base of all records; `CODE` is the frame type, never reused."""

    CODE: ClassVar[int]

    t_ns: int


class Shape(msgspec.Struct, frozen=True, array_like=True):
    """What the cost model must know of a model; `weight_bits` and `kv_bits` are per element."""

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
    """Layers that see all tokens although the others have a window."""
    head_bits: int = 0
    """Of lm_head and the embedding; 0 where they are like the other weights."""
    num_shared_gates: int = 0
    """Outputs of the router that weigh the shared experts."""


class EngineInfo(Record, frozen=True, gc=False, array_like=True):
    """Who is being observed. Strings are empty and numbers 0 where the engine does not say."""

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
    """In disaggregated serving: prefill, decode or both."""
    max_running: int = 0
    token_budget: int = 0
    block_tokens: int = 0
    num_blocks: int = 0
    options_hash: str = ""
    num_threads: int = 0
    """Threads that compute, on a CPU."""


class Keyframe(Record, frozen=True, gc=False, array_like=True):
    """Starts a keyframe: EngineInfo, CostTable, Live and at its end a Clock restate all state.

    With more than 512 requests in flight other records stand among the Live ones, before the
    Clock; a Clock with `device_ns` is not the keyframe's.
    """

    CODE: ClassVar[int] = 1

    state: int
    """One of `PROBE_STATES`."""
    previous_position: int
    """Where the keyframe before this one starts in the ring, -1 for none: readers walk back."""
    paused_ns: int | None = None
    """Since when somebody has paused the engine; None where nobody has, or nobody says."""


class StepPlan(Record, frozen=True, gc=False, array_like=True):
    """What the scheduler decided, and under which constraint."""

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
    """Which part of the step belongs to which request: one row per (request, phase) segment."""

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
        """Return whether each row decodes one token and samples one row of logits, no drafts."""
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
    """A step of the rows of the ring's last StepSlices, all of them plain decodes.

    Each row has computed one token in every step since: its context is that of the StepSlices plus
    the difference of the two step numbers. A reader that does not have the frame which
    `frames_back` points to does not know the members of this step.

    In place of StepPlan, StepSlices and an earlier step's Emitted, in 60 bytes for any batch.
    """

    CODE: ClassVar[int] = 13

    step: int
    frames_back: int
    """From this frame to that of the StepSlices, in sequence numbers."""
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
    """From this step to an earlier one of the same members, each of which emitted one token; 0 for
    none."""
    emitted_before_ns: int = 0
    """When these tokens left, counted back from `start_ns`."""


class StepSpan(Record, frozen=True, gc=False, array_like=True):
    """When one rank executed the step."""

    CODE: ClassVar[int] = 5

    step: int
    digest: int
    """Of the slices; 0 where this rank cannot know them."""
    launch_start_ns: int
    launch_end_ns: int
    ready_ns: int
    device_start_ns: int | None = None
    """Raw device offset since the probe's first anchor; see `Clock`."""
    device_end_ns: int | None = None
    marks_ns: tuple[int, ...] = ()
    """Within the step; nothing writes or reads them yet."""
    mode: str = "eager"
    padded_tokens: int = 0
    cold: bool = False
    dummy: bool = False
    overlapped: bool = False
    prefill_tokens: int | None = None
    """Of the step, as a rank knows them whose slices another process tells; None where it does not.
    Where that process is on another host, they are all that is known here of the step's phases."""
    decode_tokens: int = 0
    """The others, likewise."""


class Emitted(Record, frozen=True, gc=False, array_like=True):
    """Tokens leaving the engine loop, or (from a front end) written to clients.

    They left at `at_ns`; at `t_ns` where that is None, or no time before it.
    """

    CODE: ClassVar[int] = 6

    requests: bytes
    tokens: bytes
    step: int = -1
    at_ns: int | None = None
    blocked_ns: bytes = b""
    """From a front end, per request: for how long before they left its connection took no more.
    A row without tokens reports that alone."""

    @property
    def left_ns(self) -> int:
        """Return when they left: never after that was written, whatever a damaged record says."""
        at_ns = self.at_ns
        return self.t_ns if at_ns is None or not 0 <= at_ns <= self.t_ns else at_ns


class RequestEvent(Record, frozen=True, gc=False, array_like=True):
    """A change in a request's life; only the fields its kind speaks of are set."""

    CODE: ClassVar[int] = 7

    index: int
    kind: int
    at_ns: int
    request_id: str = ""
    """The engine's own id, on the first event of each ring: the key that joins rings."""
    external_id: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    reason: str = ""
    parent: str = ""
    trace: str = ""
    """W3C `traceparent` as received."""
    attributes: dict[str, str] | None = None
    prompt_parts: tuple[tuple[str, int], ...] = ()
    """Names and numbers of tokens, in the order of the prompt, as the client or the server says."""
    reasoning_tokens: int | None = None
    """Of the answer, where the engine tells them apart."""
    adapter: str = ""
    prefix_digests: tuple[int, ...] = ()
    """Of the prompt's first PREFIX_TOKENS, for as many as it is long; equal where those are."""


class Live(Record, frozen=True, gc=False, array_like=True):
    """All requests in flight, so that a reader who joined late knows them."""

    CODE: ClassVar[int] = 8

    requests: bytes
    states: bytes
    prompt_tokens: bytes
    cached_tokens: bytes
    arrived_ns: bytes
    request_ids: tuple[str, ...]


class Clock(Record, frozen=True, gc=False, array_like=True):
    """The clocks side by side, at `host_ns` (at `t_ns` where that is None)."""

    CODE: ClassVar[int] = 9

    real_ns: int
    device_ns: int | None = None
    """The device offset reached then, give or take `error_ns`; without it `real_ns` is meant."""
    error_ns: int | None = None
    host_ns: int | None = None

    @property
    def at_ns(self) -> int:
        """Return when the clocks stood so."""
        return self.t_ns if self.host_ns is None else self.host_ns


class ProbeHealth(Record, frozen=True, gc=False, array_like=True):
    """The probe on itself."""

    CODE: ClassVar[int] = 10

    state: int
    frames: int
    errors: int
    cost_ns: int
    """Time spent inside the probe on the engine's thread, since it opened."""
    complete_through_ns: int
    """Every step that started before this has its span in the ring."""
    dropped: int = 0
    message: str = ""
    odd_values: int = 0
    """Arguments that no record could hold: clamped, cut, left out, or their whole call left out."""
    lost_calls: int = 0
    """Calls left out because the probe was busy with others, or the process out of memory."""
    unsupported: tuple[str, ...] = ()
    """Features of this process's engine that the probe cannot observe, with the reason."""
    hidden_ns: int = 0
    """Part of `cost_ns` that was spent while the device computed: no step waited for it."""


class CounterSample(Record, frozen=True, gc=False, array_like=True):
    """Hardware counters over one window.

    Without values it is news of the source itself: `facts` when it has opened a device, `reason`
    when it has nothing more to tell. The sampler's keyframes restate it.
    """

    CODE: ClassVar[int] = 11

    device_uuid: str
    """As the vendor writes it, a MIG instance's its own; empty: the host, or the source itself."""
    start_ns: int
    end_ns: int
    source: str
    values: dict[str, float]
    """By the words of `COUNTERS`; what the source cannot tell is absent."""
    facts: dict[str, str] = {}
    reason: str = ""
    """Why the source is silent from here on, and what to do about it."""
    starts_ns: bytes = b""
    """Columns of the short windows that this one is made of, where the source has such."""
    ends_ns: bytes = b""
    series: dict[str, bytes] = {}
    """The values of those windows: one column per word, of which `values` has the whole."""
    real_offset_ns: int | None = None
    """What was taken off stamps of the wall clock to put them on ours; None where they are ours.

    With it readers get the stamps back and place them by the anchors in the ring's `Clock` records:
    one distance does not fit all stamps where the wall clock was set among them.
    """


class Transfer(Record, frozen=True, gc=False, array_like=True):
    """KV blocks of a request moved between workers; told by the one that waited for them."""

    CODE: ClassVar[int] = 12

    index: int
    num_bytes: int
    start_ns: int
    end_ns: int
    peer: str
    """The other worker: its engine's id where that is known, else its address."""
    peer_request_id: str = ""
    """What that engine calls the request; then `peer` is its engine's id."""


CALIBRATION = "calibration"
"""The source of a CostTable that was measured on this device."""


class CostTable(Record, frozen=True, gc=False, array_like=True):
    """What is known of the device before the first step; see `inferscope.cost.table`.

    An engine's keyframes restate it. Where they do not, a reader on the engine's host puts it
    behind each description of the engine in what it folds and records (`collector.calibrated`).
    """

    CODE: ClassVar[int] = 33

    fit_id: str
    mode: str
    """Of execution; empty for all."""
    source: str
    """calibration."""
    coefficients: dict[str, float]


# --- written by readers -----------------------------------------------------------------------


class Tick(Record, frozen=True, gc=False, array_like=True):
    """The fold's only clock: deadlines are decided here. One each `TICK_NS` of monotonic time."""

    CODE: ClassVar[int] = 32

    real_ns: int


TICK_NS = 200_000_000


class RingOpened(Record, frozen=True, gc=False, array_like=True):
    """Gives a ring its number within a recording."""

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
    """What the reader has added to all times of the ring: its process has another monotonic clock,
    in a time namespace of its own."""


class Missed(Record, frozen=True, gc=False, array_like=True):
    """Frames that the reader knows it did not see, and why."""

    CODE: ClassVar[int] = 35

    ring: int
    num_frames: int
    reason: str
    """lapped or damaged."""


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
    Tick,
    CostTable,
    RingOpened,
    Missed,
)

_KIND_OF_CODE = {kind.CODE: kind for kind in RECORD_TYPES}
_DECODERS: dict[int, msgspec.msgpack.Decoder[Record]] = {}
"""Made when first needed: who only writes pays for none."""
_ENCODER = msgspec.msgpack.Encoder()

encode = _ENCODER.encode
"""Turn a record into a frame's payload."""


class UnknownRecord(ValueError):
    """A frame's type or content is not one this version can read."""


def decode(code: int, payload: bytes | memoryview) -> Record:
    """Read a frame's payload.

    Raises:
        UnknownRecord: for a type this version does not know, or a payload that is not one of it.
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
