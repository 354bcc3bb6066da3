"""The cost book: the model in force for each execution mode, and its accuracy.

A mode starts with what this device was calibrated to, where its engine names it, else with the
roofline of the model's shape, and moves to the online fit when there is one.
Beside each model stands the ratio of measured to modelled time over its recent steps: the 20th
percentile is what a healthy step takes, the median less one is the residual that gets published.
Only a model that has learned from this engine can call a step slow. By the roofline, whole kinds of
steps take several times what they should; booked as slowness and kept from the fit, they would
never be learned.

Two things look alike, a machine that has become slow and work that the model does not know. What
tells them apart is whether such work was there when the model was learned. If it was, slow steps
are neither learned nor taken for healthy, however long it lasts; if not, they are learned at once,
but for what a slow machine brings with it: work piles up on it as never before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from inferscope.cost.fit import OnlineFit
from inferscope.cost.model import StepModel, roofline
from inferscope.cost.peaks import peaks_of
from inferscope.cost.pure_steps import Bounds, PureStep, PureSteps
from inferscope.cost.table import is_of_steps, is_sound, measured_flops_s, model_of
from inferscope.records import CALIBRATION, CostTable, EngineInfo, Shape

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_RATIOS = 256
_RATIOS_AGAIN = 16
_ENOUGH_RATIOS = 8
_SLOW = 1.5
"""Largest ratio to a healthy step at which a step of a known kind enters the fit. It refers to what
was healthy when the model was learned, because a slow machine's first steps raise the ratio."""
REFIT = "refit"
"""Prefix of the fit ids of a second pass."""
_ENOUGH_CHUNKED = 32
"""Smallest number of steps with chunks from which a model of them is learned."""
_DRIFT = 1.2
"""Largest rise of the healthy ratio since the model was learned; above it the machine changed."""


def is_sure_of(model: StepModel) -> bool:
    """Return whether enough steps of both phases have taught a model to split any step."""
    return not model.is_provisional and not 0 < model.num_chunked < _ENOUGH_CHUNKED


def ratios_of(measured_ns: Ints, modelled_ns: Floats) -> Floats:
    """Return measured over modelled times, 1 if the model predicts nothing: [steps]."""
    ratios: Floats = np.ones(len(measured_ns))
    np.divide(measured_ns, modelled_ns, out=ratios, where=modelled_ns > 0)
    return ratios


def _to_weighing(num_seen: int) -> int:
    """Return the number of steps until ratios are weighed again."""
    if num_seen < _ENOUGH_RATIOS:
        return _ENOUGH_RATIOS - num_seen
    return _RATIOS_AGAIN - num_seen % _RATIOS_AGAIN


class Mode:
    """State of one execution mode.

    Attributes:
        model: in force.
        healthy_ratio: measured over modelled time of a healthy step; None before there is a fit to
            tell.
        residual: the median of measured/model - 1 over recent steps; None before there are enough.
    """

    def __init__(self, name: str, model: StepModel) -> None:
        """Start with a model that has not learned from this engine."""
        self._name = name
        self.model = self._first = model
        self.healthy_ratio: float | None = None
        self.residual: float | None = None
        self._fit = OnlineFit(name)
        self._fit.begin_with(model)
        self._ratios = np.empty(_RATIOS)
        """Latest ratios; the oldest is overwritten first."""
        self._num_ratios = 0
        self._num_seen = 0
        self._learned_ratio: float | None = None
        """Ratio of healthy steps when the model was learned; None for a model that was not."""
        self._stages = _Stages()
        self._sum_ns = self._bounded_ns = 0
        self._has_slowed = False
        """Whether most recent steps take much longer than was healthy."""
        self._is_frozen = self._is_refit_due = False

    @property
    def num_steps(self) -> int:
        """Return the number of observed steps."""
        return self._num_seen

    @property
    def bounded_share(self) -> float:
        """Return the share of its steps' time that measured steps took off a member's own part."""
        return self._bounded_ns / self._sum_ns if self._sum_ns else 0.0

    def frozen(self) -> Mode:
        """Return this mode with a last fit to all that it remembers, which no step changes."""
        if self.model is not self._first or self.model.source != CALIBRATION:
            model = self._fit.solve()
            if model is not None:
                self._take(model)
        fit_id = f"{REFIT}-{self.model.fit_id}"
        mode = Mode(self._name, replace(self.model, fit_id=fit_id))
        mode.healthy_ratio = mode._learned_ratio = self.healthy_ratio
        mode._is_frozen = True
        return mode

    def begin_with(self, model: StepModel) -> None:
        """Install a better first model, unless there is a fit already."""
        if self._learned_ratio is None and model is not self._first and not self._is_frozen:
            self.model = self._first = model
            self._fit.begin_with(model)
            self._num_ratios = 0  # they were of another model
            self.residual = None

    def observe(
        self,
        rows: Floats,
        *,
        measured_ns: Ints,
        modelled_ns: Floats,
        stages_ns: Sequence[Sequence[int]] = (),
    ) -> Floats:
        """Learn from some steps that were not cold, up to one that brings a model into force.

        Args:
            rows: [steps, kept], see `fit.features`.
            measured_ns: [steps], their delays, over all stages.
            modelled_ns: [steps], time by the model in force.
            stages_ns: [steps], times of the stages of a pipeline; empty where there is none.

        Returns:
            [learned], measured over modelled time of a healthy step, as it was known before each.
        """
        ratios = ratios_of(measured_ns, modelled_ns)
        is_slow = self._is_slow(ratios, modelled_ns, stages_ns)
        num = len(ratios)
        if is_slow.any():  # whether slow ones are learned depends on the weighing before them
            to_weighing = _to_weighing(self._num_seen)
            num = min(num, to_weighing - 1 or _to_weighing(self._num_seen + 1))
        healthy = self.healthy(ratios[:num])
        noted = 0
        if _to_weighing(self._num_seen) == 1:
            noted = self._weigh_next(ratios, healthy, 0)
        if not self._is_frozen:
            num = self._learn(rows[:num], measured_ns[:num], is_slow[:num], stages_ns)
        while noted + _to_weighing(self._num_seen) <= num:
            noted = self._weigh_next(ratios, healthy, noted)
        self._note(ratios[noted:num])
        self._sum_ns += int(measured_ns[:num].sum())
        if self._is_refit_due:
            self._is_refit_due = False
            model = self._fit.solve()
            if model is not None:
                self._take(model)
        return healthy[:num]

    def _is_slow(
        self, ratios: Floats, modelled_ns: Floats, stages_ns: Sequence[Sequence[int]]
    ) -> Flags:
        """Return whether each step or one of its stages took longer than healthy: [steps]."""
        learned = self._learned_ratio
        if learned is None:
            return np.zeros(len(ratios), dtype=np.bool_)
        is_slow: Flags = ratios > _SLOW * learned
        for at, stages in enumerate(stages_ns):
            is_slow[at] |= self._stages.is_slow(stages, _SLOW * learned * modelled_ns.item(at))
        return is_slow

    def _learn(
        self,
        rows: Floats,
        measured_ns: Ints,
        is_slow: Flags,
        stages_ns: Sequence[Sequence[int]],
    ) -> int:
        """Add the healthy steps to the fit, up to the next solution.

        Returns:
            number of steps used, including the ones left out.
        """
        num, is_healthy = len(rows), ~is_slow
        if is_slow.any() and not self._has_slowed:
            is_healthy |= ~self._fit.knows(rows)
        taken = (is_healthy & (measured_ns > 0)).nonzero()[0]
        if len(taken):
            num_taken = self._fit.observe(rows[taken], measured_ns[taken])
            self._is_refit_due = self._fit.is_due
            if self._is_refit_due:
                num = taken.item(num_taken - 1) + 1
        if stages_ns:
            for at in is_healthy[:num].nonzero()[0].tolist():
                self._stages.observe(stages_ns[at])
        return num

    def _weigh_next(self, ratios: Floats, healthy: Floats, noted: int) -> int:
        """Note ratios up to the next weighing, and what is healthy behind it; return how many."""
        num = noted + _to_weighing(self._num_seen)
        self._note(ratios[noted:num])
        self._weigh()
        healthy[num:] = self.healthy(ratios[num : len(healthy)])
        return num

    def healthy(self, ratios: Floats) -> Floats:
        """Return measured over modelled time of healthy steps; the steps' own without a fit."""
        healthy: Floats = ratios.copy()
        if self.healthy_ratio is not None:
            healthy[:] = self.healthy_ratio
        return healthy

    def _note(self, ratios: Floats) -> None:
        at = np.arange(self._num_ratios, self._num_ratios + len(ratios)) % _RATIOS
        self._ratios[at] = ratios
        self._num_ratios += len(ratios)
        self._num_seen += len(ratios)

    def note_bounded(self, bounded_ns: int) -> None:
        """Add the nanoseconds by which measured steps bounded a step that was not cold."""
        self._bounded_ns += bounded_ns

    def _take(self, model: StepModel) -> None:
        """Install a model that was fitted to the last steps."""
        self.model = model
        ratios = self._fit.ratios(_RATIOS)
        self._num_ratios = len(ratios)
        self._ratios[: len(ratios)] = ratios
        if not model.is_provisional:  # else whole kinds of steps may take several times as long
            healthy_at = len(ratios) // 5
            self.healthy_ratio = np.partition(ratios, healthy_at).item(healthy_at)
            self._learned_ratio = self.healthy_ratio
            self._stages.settle()
        self._weigh()

    def _weigh(self) -> None:
        num = min(self._num_ratios, _RATIOS)
        healthy_at, median_at = num // 5, num // 2
        ordered = self._ratios[:num].copy()
        ordered.partition((healthy_at, median_at))
        self.residual = ordered.item(median_at) - 1.0
        learned, healthy = self._learned_ratio, ordered.item(healthy_at)
        if learned is not None and not self._is_frozen:
            self._has_slowed = healthy > _DRIFT * learned
            self.healthy_ratio = learned if self._has_slowed else healthy


class _Stages:
    """Usual share of each pipeline stage in a step's time.

    One stage that takes twice as long makes the steps of four stages a quarter longer, which alone
    is less than a slow step takes.
    """

    def __init__(self) -> None:
        self._num = 0
        self._shares = np.zeros((0, 0))
        """[_RATIOS, stages], of the last learned steps."""
        self._usual: list[float] = []

    def observe(self, stages_ns: Sequence[int]) -> None:
        """Add a healthy step; a single stage has no other to compare with."""
        whole_ns = sum(stages_ns)
        if len(stages_ns) < 2 or not whole_ns:
            return
        if len(stages_ns) != self._shares.shape[1]:
            self._num, self._usual = 0, []
            self._shares = np.zeros((_RATIOS, len(stages_ns)))
        self._shares[self._num % _RATIOS] = np.divide(stages_ns, whole_ns)
        self._num += 1

    def settle(self) -> None:
        """Set the usual shares to the medians of the last steps."""
        if self._num:
            self._usual = np.median(self._shares[: self._num], axis=0).tolist()

    def is_slow(self, stages_ns: Sequence[int], limit_ns: float) -> bool:
        """Return whether some stage takes more than its usual share of a whole step's limit."""
        return len(stages_ns) == len(self._usual) and any(
            stage_ns > share * limit_ns
            for stage_ns, share in zip(stages_ns, self._usual, strict=True)
        )


class CostBook:
    """Models by execution mode, for one engine.

    Attributes:
        pure_steps: times of steps of one phase, in any mode.
    """

    def __init__(self) -> None:
        """Start without a shape."""
        self._peaks = peaks_of("")
        self._shape: Shape | None = None
        self._roofline = roofline(None, self._peaks)
        self._tables: dict[tuple[str, bool], CostTable] = {}
        """Table by mode, and whether it describes steps or a device's rates."""
        self._calibrated: dict[str, StepModel] = {}
        """Model by mode; "" for all modes."""
        self._modes: dict[str, Mode] = {}
        self.pure_steps = PureSteps()
        self._is_frozen = False

    def describe(self, info: EngineInfo) -> None:
        """Set the model's shape and device from the engine's record."""
        self._shape, self._peaks = info.shape, peaks_of(info.device, info.num_threads)
        if not self._is_frozen:
            self.pure_steps = PureSteps()
        self._roofline = roofline(self._shape, self._peaks)
        self._calibrated = {}
        # Steps of another model do not apply to this one; the device is the same.
        self._tables = {key: table for key, table in self._tables.items() if not key[1]}
        for table in self._tables.values():
            self._take(table)
        self._restart()

    def calibrate(self, table: CostTable) -> bool:
        """Start from measurements of this device; return False for an unsound table.

        Keyframes repeat it: a known table changes nothing. Rates do not apply to a shape that is
        not counted, or not known yet; they are kept for another.
        """
        key = (table.mode, is_of_steps(table))
        known = self._tables.get(key)
        if known is not None and known.fit_id == table.fit_id:
            return True
        if not is_sound(table):
            return False
        self._tables[key] = table
        self._take(table)
        self._restart()
        return True

    def frozen(self) -> CostBook:
        """Return a book for a second pass over the same steps: models and bounds stay as here."""
        book = CostBook()
        book._is_frozen = True
        book._modes = {name: mode.frozen() for name, mode in self._modes.items()}
        book.pure_steps = self.pure_steps
        return book

    def learn_pure(self, steps: Iterable[PureStep | None]) -> None:
        """Add steps of one phase that were not cold; None for any other step."""
        if not self._is_frozen:
            for step in steps:
                if step is not None:
                    self.pure_steps.observe(*step)

    @property
    def memory_peaks(self) -> dict[str, float]:
        """Return the device's memory bandwidth in bytes per second: `spec` and `measured`.

        The first comes from its manufacturer, the second from a calibration; unknown values are
        absent.
        """
        peaks = {"spec": self._peaks.memory_bytes_s} if self._peaks.is_known else {}
        rates = self._tables.get(("", False))
        measured = rates.coefficients.get("read_bytes_s") if rates is not None else None
        return peaks | ({"measured": measured} if measured else {})

    @property
    def compute_peaks(self) -> dict[str, float]:
        """Return the device's compute rates for this model in FLOPs per second, likewise.

        In what the model's activations are: manufacturers publish no rate for 32 bits.
        """
        shape = self._shape
        if shape is None:
            return {}
        by_bits = {8: self._peaks.fp8_flops_s, 16: self._peaks.bf16_flops_s}
        spec = by_bits.get(shape.activation_bits) if self._peaks.is_known else None
        rates = self._tables.get(("", False))
        measured = None if rates is None else measured_flops_s(rates.coefficients, shape)
        peaks = {"spec": spec} if spec else {}
        return peaks | ({"measured": measured} if measured else {})

    def _take(self, table: CostTable) -> None:
        """Build the model of a table; measured steps take precedence over rates."""
        model = model_of(table, self._shape, self._peaks)
        held = self._tables.get((table.mode, True))
        if model is not None and (held is None or is_of_steps(table)):
            self._calibrated[table.mode] = model

    def _restart(self) -> None:
        """Install the best first model for the modes without a fit."""
        for name, mode in self._modes.items():
            mode.begin_with(self._first(name))

    def _first(self, name: str) -> StepModel:
        """Return the first model of a mode."""
        return self._calibrated.get(name) or self._calibrated.get("") or self._roofline

    def bounds(
        self, model: StepModel, tokens: Ints, contexts: Ints, prefills: list[int]
    ) -> Bounds | None:
        """Return the longest time, by measured steps, that a step's members take alone.

        A model that few steps have taught is bounded for all of them, another one for prefills: it
        knows those of their size from extrapolation only, where most prompts are long. Steps of
        all modes count, for a member alone would have run in the mode of its own.

        Args:
            model: in force.
            tokens: [members].
            contexts: [members].
            prefills: positions of those that prefill.
        """
        if len(tokens) < 2:
            return None
        if is_sure_of(model) or (not model.is_provisional and tokens.max() == 1):
            return self.pure_steps.bounds(tokens, contexts, prefills)
        return self.pure_steps.bounds_of_all(tokens, contexts)

    def mode(self, name: str) -> Mode:
        """Return the state of an execution mode."""
        mode = self._modes.get(name)
        if mode is None:
            mode = self._modes[name] = Mode(name, self._first(name))
        return mode

    @property
    def modes(self) -> Mapping[str, Mode]:
        """Return all modes that were asked for, by name; the ones with the most steps first."""
        by_steps = sorted(self._modes.items(), key=lambda item: (-item[1].num_steps, item[0]))
        return dict(by_steps)
