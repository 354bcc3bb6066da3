"""Forward-pass metrics from a file or a socket, one message for each pass of a scheduler.

SGLang publishes msgpack over ZMQ (`--enable-forward-pass-metrics`); Dynamo relays that of its
backends, and writes it as JSON Lines with `--fpm-trace`. A message of zeros is a sign of life.
"""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

import msgspec

from inferscope.errors import BadInput, NotFound

_MOST_PASSES = 2_000_000
_LONGEST_LINE = 64 << 10
_POLL_MS = 100


class ScheduledRequests(msgspec.Struct, frozen=True, gc=False):
    """Requests that a pass computed."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    """Prompt tokens computed in the pass; cached ones are not among them."""
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0


class QueuedRequests(msgspec.Struct, frozen=True, gc=False):
    """Requests that waited during a pass."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    num_decode_requests: int = 0
    """Requests that had begun to decode: they lost their KV blocks, or wait for a transfer."""


class ForwardPass(msgspec.Struct, frozen=True, gc=False):
    """One message; the field names are the protocol's."""

    wall_time: float
    """Seconds: of the device's work in SGLang, of the whole iteration in vLLM; 0 in between."""
    scheduled_requests: ScheduledRequests
    queued_requests: QueuedRequests
    worker_id: str = ""
    dp_rank: int = 0
    counter_id: int | None = None
    observed_real_ns: int | None = None
    """Wall time at which the message was seen; None if the source does not state it."""
    is_sampled: bool = False
    """Whether the source leaves passes out."""

    @property
    def is_idle(self) -> bool:
        """Return whether it is a sign of life of an idle scheduler."""
        return self.wall_time <= 0


class _Event(msgspec.Struct):
    fpm: ForwardPass
    observed_at_unix_ms: int
    capture_mode: str = ""


class _Envelope(msgspec.Struct):
    event: _Event


def read_passes(path: Path) -> tuple[ForwardPass, ...]:
    """Read a file of Dynamo's trace, or of bare messages as JSON Lines; gzip if it ends in `.gz`.

    Raises:
        BadInput: the file cannot be read, or is of another kind.
    """
    found: list[ForwardPass] = []
    try:
        with _open(path) as file:
            for number, line in enumerate(_lines(file), 1):
                found.append(_of_line(path, number, line))
                if len(found) > _MOST_PASSES:
                    raise BadInput(f"{path} has more than {_MOST_PASSES:,} passes. Split it.")
    except (OSError, EOFError, zlib.error) as error:
        if not found or isinstance(error, FileNotFoundError):
            raise BadInput(f"cannot read {path}: {error}. Give another file.") from error
    if not found:
        raise BadInput(f"{path} holds no forward pass.")
    return tuple(found)


def receive_passes(endpoint: str, seconds: float) -> tuple[ForwardPass, ...]:
    """Receive the messages that a scheduler publishes within some seconds.

    Raises:
        BadInput: the address cannot be used.
        NotFound: nothing was published.
    """
    import zmq  # the extra `engine`

    decoder = msgspec.msgpack.Decoder(ForwardPass)
    found: list[ForwardPass] = []
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s and len(found) < _MOST_PASSES:
            if socket.poll(_POLL_MS):
                payload = socket.recv_multipart()[-1]
                found.append(
                    msgspec.structs.replace(
                        decoder.decode(payload), observed_real_ns=time.time_ns()
                    )
                )
    except zmq.ZMQError as error:
        raise BadInput(f"cannot connect to {endpoint}: {error}. Give ipc:// or tcp://.") from None
    except msgspec.DecodeError as error:
        raise BadInput(f"{endpoint} publishes something else: {error}.") from None
    finally:
        socket.close(linger=0)
        context.term()
    if not found:
        raise NotFound(
            f"{endpoint} published nothing within {seconds:g} s. Is the server up, with "
            "--enable-forward-pass-metrics?"
        )
    return tuple(found)


def _open(path: Path) -> gzip.GzipFile | BufferedReader:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _lines(file: gzip.GzipFile | BufferedReader) -> Iterator[bytes]:
    while line := file.readline(_LONGEST_LINE):
        if line.strip():
            yield line


def _of_line(path: Path, number: int, line: bytes) -> ForwardPass:
    try:
        event = msgspec.json.decode(line, type=_Envelope).event
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:
            return msgspec.json.decode(line, type=ForwardPass)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadInput(f"{path}:{number}: not a forward pass: {error}.") from None
    return msgspec.structs.replace(
        event.fpm,
        observed_real_ns=event.observed_at_unix_ms * 1_000_000,
        is_sampled=event.capture_mode != "full",
    )
