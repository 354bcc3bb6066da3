"""What each request of a step would take by itself: T({i}), with nobody to be padded to."""

from __future__ import annotations

from operator import add

from inferscope.cost.batch import Batch, Line, Team
from inferscope.cost.model import StepModel


def alone(model: StepModel, batch: Batch, own: Line) -> Line:
    """Return each request's time by itself.

    Args:
        model: the cost model in force.
        batch: the requests of the step.
        own: their attention, as `model.own` gives it.
    """
    line = _but_for_chunks(model, batch.team)
    if not own.chunks:
        return line
    return Line(line.slope, line.level, list(map(add, own.chunks, line.chunks)))


def _but_for_chunks(model: StepModel, team: Team) -> Line:
    """Return f and g of each by itself, and of its attention what is on the line."""
    slope = model.single_ns + model.padded_ns
    f_one = model.f(1) + model.decoding_ns
    chunks = [
        model.f(tokens) + model.g(rows)
        for tokens, rows in zip(team.chunk_tokens, team.chunk_rows, strict=True)
    ]
    if team.rows is None:
        return Line(slope, f_one + model.g(1), chunks)
    return Line(slope, f_one + model.g_of(team.rows), chunks)
