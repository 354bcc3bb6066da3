"""Machine, engine and versions, and the method of every number."""

from __future__ import annotations

from inferscope import __version__
from inferscope.insight.run import EngineFacts, RunFacts
from inferscope.report.blocks import Block, Cell, Code, Column, Number, Section, Table, prose
from inferscope.report.run.source import Source
from inferscope.text import more_or_less, view_verdict
from inferscope.text.plots import UNKNOWN


def machine(engine: EngineFacts) -> Section:
    """Return what the engine reports of itself, and the accuracy of its cost model."""
    blocks: list[Block] = [_engine(engine)]
    if engine.view.cost_models:
        blocks.append(_cost_models(engine))
    verdict = view_verdict(engine.view)
    if verdict:
        blocks.append(prose(f"The last steps: {verdict}.", role="alarm"))
    if engine.view.counters.reason:
        devices = engine.view.counters.devices.values()
        when = " at the end of the records" if any(each.totals for each in devices) else ""
        reason = engine.view.counters.reason
        blocks.append(prose(f"No device counters{when}: {reason}.", role="dim"))
    if engine.view.health.unsupported:
        listed = "; ".join(engine.view.health.unsupported)
        blocks.append(prose(f"Not observed: {listed}.", role="dim"))
    return Section("machine", "Engine and machine", tuple(blocks))


def _model(engine: EngineFacts) -> str:
    """Return the served name of the model, and its own if it differs."""
    name, info = engine.view.model or UNKNOWN, engine.info
    return f"{name} ({info.model})" if info and info.model not in ("", name) else name


def _engine(engine: EngineFacts) -> Table:
    view, info = engine.view, engine.info
    deployment = view.deployment
    sizes = (
        f"tensor {deployment.tensor_ranks}, pipeline {deployment.pipeline_ranks}, data "
        f"{deployment.data_ranks}, expert {deployment.expert_ranks}"
    )
    facts: list[tuple[Cell, Cell]] = [
        ("engine", f"{view.engine} {view.version}"),
        ("engine ID", Code(engine.engine_id)),
        ("model", _model(engine)),
        ("revision", deployment.revision or UNKNOWN),
        ("bits", deployment.quantization or UNKNOWN),
        (
            "device",
            (view.device or UNKNOWN)
            + (f" {info.device_uuid}" if info and info.device_uuid else ""),
        ),
        ("clock of steps", view.clock),
        ("ranks", sizes),
        ("role", deployment.role),
        ("options hash", Code(deployment.options_hash or UNKNOWN)),
        ("requests in a batch, at most", Number.count("max_running", view.max_running or None)),
        ("tokens in a step, at most", Number.count("token_budget", view.token_budget or None)),
        ("KV blocks", Number.count("blocks_total", view.blocks_total or None)),
        ("tokens in a block", Number.count("block_tokens", view.block_tokens or None)),
    ]
    if info is not None and info.shape is not None:
        shape = info.shape
        facts.append(
            (
                "shape",
                f"{shape.num_layers} layers, hidden {shape.hidden}, {shape.num_heads} heads,"
                f" {shape.num_kv_heads} KV heads, vocabulary {shape.vocab}",
            )
        )
    facts += [
        ("process", f"{ring.role} {ring.rank}: PID {ring.pid} on {ring.host}")
        for ring in engine.rings
    ]
    return Table((Column("fact"), Column("value")), tuple(facts))


def _cost_models(engine: EngineFacts) -> Table:
    return Table(
        (
            Column("mode"),
            Column("source"),
            Column("fit"),
            Column("steps", "number"),
            Column("steps took, in the median"),
            Column("bounded by measured steps", "number"),
        ),
        tuple(
            (
                model.mode,
                model.source + (" (provisional)" if model.is_provisional else ""),
                Code(model.fit_id),
                Number.count(f"model.{model.mode}.num_steps", model.num_steps),
                UNKNOWN
                if model.residual is None
                else f"{more_or_less(model.residual)} than modelled",
                Number.share(f"model.{model.mode}.bounded_share", model.bounded_share),
            )
            for model in engine.view.cost_models
        ),
        caption="Cost models at the end of the records",
    )


_METHODS = (
    ("TTFT, TBT, E2E, total", "measured", "probe clock: host monotonic, at the edge that the engine"
     " reports (HTTP where a front end is observed)"),
    ("time of steps", "measured", "device events or host clock, as stated beside each table"),
    ("division over phases and requests", "apportioned", "Shapley value of a cost model fitted to"
     " this engine's steps; sums to the measured time"),
    ("ledger rows", "apportioned", "scheduler's records, and counterfactuals within steps; a ledger"
     " sums to its request's time"),
    ("waited for (blame)", "apportioned", "resources held or work done; sums to the ledger's row"),
    ("time alone, saved by batching", "modelled", "the cost model"),
    ("FLOPs", "modelled", "the model's shape"),
    ("bytes", "modelled", "the model's shape: weights once per step, own KV, activations; measured"
     " where counters cover them"),
    ("findings", "as marked", "each number of a finding states its method"),
    ("main cause of a missed objective", "modelled", "the request's ledger against compliant"
     " requests of similar length"),
)  # fmt: skip


def records(facts: RunFacts, source: Source) -> Section:
    """Return what the records hold and miss, and how each kind of number is made."""
    totals = facts.totals
    counted = (
        ("read", "records", totals.num_records, "records of all processes"),
        ("lost", "lost", totals.num_lost, "overwritten before they were read, or damaged"),
        ("late", "late", totals.num_late, "after their time was final; not used"),
        ("unjoined", "unjoined", totals.num_unjoined, "steps with missing records; in no sum"),
    )
    counts = Table(
        (Column("records"), Column("value", "number"), Column("meaning")),
        (
            *((name, Number.count(key, num), meaning) for name, key, num, meaning in counted),
            (
                "probe",
                Number.ms("probe_cost_ns", totals.probe_cost_ns),
                "ms that the probe took in the engine's processes",
            ),
        ),
    )
    methods = Table((Column("number"), Column("method"), Column("source")), _METHODS)
    blocks: list[Block] = [prose(f"Source: {source.name}.")]
    blocks += [prose(note, role="alarm") for note in source.notes]
    if source.is_live:
        blocks.append(
            prose("The engine was running: the report covers what its rings held.", role="dim")
        )
    blocks += [
        counts,
        methods,
        prose(f"Digest of the fold: `{totals.digest}`. Written by InferScope {__version__}."),
        prose(
            "Times, tokens, bytes, FLOPs and ledgers equal those of `inferscope export FILE` of the"
            " same records, or are sums, means or percentiles of them. Verdicts, findings, time"
            " alone and requests in flight come from the same records. A `data` element holds the"
            " exact value of each number; `-` is unknown."
        ),
    ]
    return Section("records", "Records and methods", tuple(blocks))
