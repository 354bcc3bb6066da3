"""Device time by phase and by use: what the run's steps were spent on."""

from __future__ import annotations

from inferscope.fold import DeviceTime
from inferscope.insight import ShareRow
from inferscope.insight.run import EngineFacts
from inferscope.report.blocks import (
    Bar,
    Block,
    Cell,
    Column,
    Marked,
    Number,
    Role,
    Section,
    Table,
    prose,
)
from inferscope.text.plots import closed

_USES: dict[str, tuple[str, Role]] = {
    "prefill": ("prefill", "prefill"),
    "decode": ("decode", "decode"),
    "padding": ("padding", ""),
    "unattributed": ("unattributed", ""),
    "foreign": ("other processes", "alarm"),
    "idle_no_work": ("idle: no request", ""),
    "idle_host_gap": ("idle: waiting for the host", "alarm"),
}


def phases(engine: EngineFacts) -> Section:
    """Return the division of the steps' time, and of the devices' wall time."""
    blocks: list[Block] = []
    if engine.shares.num_steps:
        blocks.append(_steps(engine))
    else:
        blocks.append(prose("No finished step was recorded.", role="dim"))
    blocks += [_device(at, each) for at, each in enumerate(engine.devices) if each.wall_ns]
    return Section("phases", "Where device time went", tuple(blocks))


def _steps(engine: EngineFacts) -> Table:
    shares = engine.shares
    rows = [_phase(each, shares.measured_ns) for each in shares.rows]
    rest = {
        "padding": shares.padding_ns,
        "idle steps": shares.idle_ns,
        "unattributed": shares.unattributed_ns,
    }
    rows += [
        (
            name,
            Number.ms(f"steps.{name}_ns", ns),
            _of(f"steps.{name}_share", ns, shares.measured_ns),
            "",
            "",
            "",
            Bar(0, ns / shares.measured_ns if shares.measured_ns else 0),
        )
        for name, ns in rest.items()
        if ns
    ]
    clock = " and ".join(shares.clocks) or "no"
    return Table(
        (
            Column("steps"),
            Column("ms", "number"),
            Column("share", "number"),
            Column("tokens", "number"),
            Column("alone ms", "number", "modelled: the same work, one request a step"),
            Column("saved by batching", "number", "(alone - total) / alone"),
            Column("", "bar"),
        ),
        tuple(rows),
        total=(
            ("sum = measured; steps: ", Number.count("steps.num", shares.num_steps)),
            Number.ms("steps.measured_ns", shares.measured_ns),
            "100.0%" if shares.measured_ns else "-",
            "",
            "",
            "",
            "",
        ),
        method=(
            f"Measured: the time of the steps ({clock} clock), summed over ranks. Apportioned: its"
            f" division over the phases (rule {shares.rule}: the Shapley value of the cost model)."
            " Modelled: alone. In whole nanoseconds the rows sum to what was measured."
        ),
    )


def _phase(row: ShareRow, measured_ns: int) -> tuple[Cell, ...]:
    name = row.name or "-"
    role: Role = "prefill" if name == "prefill" else "decode"
    whole = row.whole
    saved = whole.discount_ns / whole.standalone_ns if whole.standalone_ns else None
    return (
        Marked(name, role),
        Number.ms(f"steps.{name}_ns", whole.share_ns),
        _of(f"steps.{name}_share", whole.share_ns, measured_ns),
        Number.count(f"steps.{name}_tokens", whole.tokens),
        Number.ms(f"steps.{name}_alone_ns", whole.standalone_ns),
        Number.share(f"steps.{name}_saved_share", saved),
        Bar(0, whole.share_ns / measured_ns if measured_ns else 0, role),
    )


def _of(key: str, part: int, whole: int) -> Number:
    return Number.share(key, part / whole if whole else None)


def _device(at: int, device: DeviceTime) -> Table:
    used = [(name, ns) for name, ns in device.seconds_by_ns.items() if ns]
    mills = closed([ns for _, ns in used], 1000)
    rows: list[tuple[Cell, ...]] = []
    for (name, ns), mill in zip(used, mills, strict=True):
        label, role = _USES.get(name, (name, ""))
        rows.append(
            (
                Marked(label, role),
                Number.ms(f"device.{at}.{name}_ns", ns),
                f"{mill / 10:.1f}%",
                Bar(0, ns / device.wall_ns, role),
            )
        )
    return Table(
        (Column(f"device {device.device}"), Column("ms", "number"), Column("share", "number"),
         Column("", "bar")),
        tuple(rows),
        total=("wall time", Number.ms(f"device.{at}.wall_ns", device.wall_ns), "100.0%", ""),
        method="Measured: steps and the gaps between them; apportioned: prefill and decode.",
    )  # fmt: skip
