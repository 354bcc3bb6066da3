"""(h) Quantised weights beside whole ones: decode and prefill steps of the same model.

int8 and int4 matrices are read as they are by the kernels of decode steps, and dequantised before
each product of a prefill, which moves more bytes than whole weights; fp8 products run on Hopper's
tensor cores. MBU is by the
modelled bytes, which count a quantised weight once, and the rate that (e) measures.
"""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Any

from load import Decoding, blocks_for, open_engine, prefill
from part import Bank, Setting, Unmet, main, release, shown

from inferscope.engine.ceilings import measure_ceilings
from inferscope.engine.config import QuantizationName
from inferscope.engine.devices import find_device
from inferscope.errors import BadInput

_NAMES: tuple[QuantizationName | None, ...] = (None, "int8", "int4", "fp8")
_CEILINGS_S = 1.0
_WARM_STEPS = 4


def measure(setting: Setting, bank: Bank) -> None:
    """Measure the steps of each quantisation, the engine of one gone before the next is built."""
    read_bytes_s = measure_ceilings(find_device(setting.device), seconds=_CEILINGS_S).read_bytes_s
    for name in _NAMES:
        release()
        with bank.row(name or "whole"):
            quantized_steps(setting, bank, name, read_bytes_s=read_bytes_s)


def quantized_steps(
    setting: Setting, bank: Bank, name: QuantizationName | None, *, read_bytes_s: float
) -> None:
    """Measure the decode and prefill steps of one quantisation."""
    batches, context, num_steps = ((1, 4), 32, 4) if setting.is_dry else ((1, 64), 512, 24)
    num_tokens = 64 if setting.is_dry else 2048
    try:
        engine = open_engine(
            setting,
            num_blocks=blocks_for(max(batches), context + 2 * num_steps),
            quantization=name,
        )
    except BadInput as refused:
        raise Unmet(str(refused)) from refused
    row: dict[str, Any] = {"step_ms": {}, "mbu": {}, "over_whole": {}}
    try:
        for batch in batches:
            with closing(Decoding(engine, batch=batch, context=context)) as decoding:
                decoding.run(_WARM_STEPS)
                phase = decoding.run(num_steps)
            row["step_ms"][f"decode {batch}"] = phase.step_ns / 1e6
            seconds = (phase.end_ns - phase.start_ns) / 1e9
            row["mbu"][f"decode {batch}"] = phase.bytes / seconds / read_bytes_s
        prefill(engine, num_tokens=num_tokens, num_prompts=2)
        phase = prefill(engine, num_tokens=num_tokens, num_prompts=6)
        row["step_ms"][f"prefill {num_tokens}"] = phase.step_ns / 1e6
    finally:
        engine.close()
    whole_ms = bank.rows.get("whole", {}).get("step_ms", {})
    row["over_whole"] = {
        kind: step_ms / whole_ms[kind] if kind in whole_ms else None
        for kind, step_ms in row["step_ms"].items()
    }
    bank.keep(
        name or "whole",
        row,
        f"{name or 'whole':<5} "
        + "; ".join(
            f"{kind} {step_ms:.2f} ms ({shown(row['over_whole'][kind], '.2f')} of whole"
            + (f", MBU {row['mbu'][kind]:.1%})" if kind in row["mbu"] else ")")
            for kind, step_ms in row["step_ms"].items()
        ),
    )


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
