"""Steps and requests as a Chrome JSON trace, which Perfetto's UI opens.

Two processes an engine: its steps, a track a rank, and its requests, a track each. A step is
split visually into its prefill and decode part, in proportion to their shares (the device ran both
at once; the order is ours). A request shows its phases in the order of its ledger.
"""

from __future__ import annotations

from typing import IO, Any

import msgspec

from inferscope.collector.finals import DeviceTime, FinalRequest, FinalStep, RunTotals
from inferscope.records import PREFILL

_NS_PER_US = 1000


class PerfettoExporter:
    """Writes a Chrome JSON trace."""

    def __init__(self, out: IO[bytes]) -> None:
        """Take the file to write to."""
        self._out = out
        self._encode = msgspec.json.Encoder().encode
        self._engines: dict[str, int] = {}
        self._tracks: set[tuple[int, int]] = set()
        self._num_requests = 0
        self._is_first = True
        self._out.write(b'{"displayTimeUnit":"ms","traceEvents":[')

    def step(self, step: FinalStep) -> None:
        """Write a step and its two phases, and the batch's size as counters."""
        process = self._process(step.engine_id)
        track = step.rank
        self._name_track(process, track, f"rank {step.rank}")
        is_prefill = step.phases == PREFILL
        prefill_ns = int(step.shares_ns[is_prefill].sum())
        decode_ns = int(step.shares_ns.sum()) - prefill_ns
        kind = "mixed" if prefill_ns and decode_ns else "prefill" if prefill_ns else "decode"
        self._slice(
            process,
            track,
            f"{kind} step {step.step}",
            step.start_ns,
            step.measured_ns,
            {
                "requests": len(set(step.request_ids)),
                "prefill_tokens": int(step.tokens[is_prefill].sum()),
                "decode_tokens": int(step.tokens[~is_prefill].sum()),
                "prefill_ns": prefill_ns,
                "decode_ns": decode_ns,
                "clock": step.clock,
                "cold": step.is_cold,
                "model_residual": round(step.model_residual, 4),
                "fit": step.fit_id,
            },
        )
        if prefill_ns:
            self._slice(process, track, "prefill", step.start_ns, prefill_ns, {})
        if decode_ns:
            self._slice(process, track, "decode", step.start_ns + prefill_ns, decode_ns, {})
        self._write(
            {
                "ph": "C",
                "name": "tokens in step",
                "pid": process,
                "ts": step.start_ns / _NS_PER_US,
                "args": {
                    "prefill": int(step.tokens[is_prefill].sum()),
                    "decode": int(step.tokens[~is_prefill].sum()),
                },
            }
        )

    def request(self, request: FinalRequest) -> None:
        """Write a request on a track of its own: queue, prefill, decode, delivery."""
        process = self._process(request.engine_id) + 1
        self._num_requests += 1
        track = self._num_requests
        name = request.external_id or request.request_id
        self._name_track(process, track, name)
        milliseconds = {
            f"{cause}_ms": round(spent_ns / 1e6, 3) for cause, spent_ns in request.ledger_ns.items()
        }
        self._slice(
            process,
            track,
            f"{name} ({request.finish})",
            request.arrived_ns,
            request.delivered_ns - request.arrived_ns,
            {
                "prompt_tokens": request.prompt_tokens,
                "cached_tokens": request.cached_tokens,
                "output_tokens": request.output_tokens,
                "prefill_compute_ms": round(request.prefill_ns / 1e6, 3),
                "decode_compute_ms": round(request.decode_ns / 1e6, 3),
                **milliseconds,
            },
        )
        edges = (
            ("queue", request.arrived_ns, request.admitted_ns),
            ("prefill", request.admitted_ns, request.first_token_ns),
            ("decode", request.first_token_ns, request.last_token_ns),
            ("delivery", request.last_token_ns, request.delivered_ns),
        )
        for phase, start_ns, end_ns in edges:
            if start_ns is not None and end_ns is not None and end_ns > start_ns:
                self._slice(process, track, phase, start_ns, end_ns - start_ns, {})

    def close(self, devices: list[DeviceTime], totals: RunTotals) -> None:
        """End the document."""
        digest = self._encode({"digest": totals.digest, "records": totals.num_records})
        self._out.write(b'],"otherData":' + digest + b"}\n")

    def _process(self, engine_id: str) -> int:
        """Return an engine's process number; its requests have the next one."""
        if engine_id not in self._engines:
            number = self._engines[engine_id] = 2 * len(self._engines) + 1
            for offset, name in ((0, "steps"), (1, "requests")):
                self._write(
                    {
                        "ph": "M",
                        "name": "process_name",
                        "pid": number + offset,
                        "args": {"name": f"{name} of {engine_id}"},
                    }
                )
        return self._engines[engine_id]

    def _name_track(self, process: int, track: int, name: str) -> None:
        if (process, track) not in self._tracks:
            self._tracks.add((process, track))
            self._write(
                {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": process,
                    "tid": track,
                    "args": {"name": name},
                }
            )

    def _slice(
        self,
        process: int,
        track: int,
        name: str,
        start_ns: int,
        duration_ns: int,
        args: dict[str, Any],
    ) -> None:
        self._write(
            {
                "ph": "X",
                "name": name,
                "pid": process,
                "tid": track,
                "ts": start_ns / _NS_PER_US,
                "dur": duration_ns / _NS_PER_US,
                "args": args,
            }
        )

    def _write(self, event: dict[str, Any]) -> None:
        if not self._is_first:
            self._out.write(b",\n")
        self._is_first = False
        self._out.write(self._encode(event))
