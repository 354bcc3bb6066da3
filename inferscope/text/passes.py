"""Forward passes as lines of text."""

from __future__ import annotations

from inferscope.insight.passes import PassesDocument
from inferscope.text.plots import UNKNOWN, count, milliseconds, per_second, plain, to_ascii

LABEL = "from forward-pass metrics: no single requests, no ledger"


def passes_text(view: PassesDocument, *, ascii: bool = False) -> str:
    """Return a view as text."""
    workers = ", ".join(filter(None, view.workers)) or UNKNOWN
    missing = UNKNOWN if view.num_missing is None else count(view.num_missing)
    lines = [
        plain(f"InferScope  {view.name}  workers {workers}  ranks {view.num_ranks}"),
        f"▲ {LABEL}" + ("; sampled, so without rates" if view.is_sampled else ""),
        "",
        f"  {'running':12}{count(view.num_running):>10}",
        f"  {'waiting':12}{count(view.num_waiting):>10}",
        f"  {'preempted':12}{count(view.num_preempted):>10}",
        f"  {'prompt':12}{per_second(view.prompt_tok_s):>10} tok/s",
        f"  {'passes':12}{count(view.num_passes):>10}   missing {missing}",
        "",
        f"  {'ms':12}{'p50':>10}{'p99':>10}{'num':>10}",
    ]
    kinds = (("prefill", view.prefill), ("decode", view.decode), ("mixed", view.mixed))
    for name, times in kinds:
        cells = (
            (UNKNOWN,) * 3
            if times is None
            else (milliseconds(times.p50_ns), milliseconds(times.p99_ns), count(times.num))
        )
        lines.append(f"  {name:12}" + "".join(f"{cell:>10}" for cell in cells))
    text = "\n".join(lines) + "\n"
    return to_ascii(text) if ascii else text
