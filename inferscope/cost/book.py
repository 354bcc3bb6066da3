"""The cost book: which model is in force, per execution mode, and how well it does.

A mode starts with what this device was calibrated to, where its engine says so, else with the
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

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from inferscope.cost.batch import Batch
from inferscope.cost.fit import OnlineFit, features
from inferscope.cost.model import StepModel, roofline
from inferscope.cost.peaks import peaks_of
from inferscope.cost.pure_steps import Bounds, PureSteps
from inferscope.cost.table import is_of_steps, is_sound, measured_flops_s, model_of
from inferscope.records import CALIBRATION, CostTable, EngineInfo, Shape

_RATIOS = 256
_RATIOS_AGAIN = 16
_ENOUGH_RATIOS = 8
_SLOW = 1.5
"""Steps above this multiple of a healthy step do not enter the fit, if their kind is known: of
what was healthy when the model was learned, for a slow machine's first steps raise the ratio."""
REFIT = "refit"
"""Prefix of the fit ids of a second pass."""
_ENOUGH_CHUNKED = 32
"""Steps with chunks that a model of them must have learned from."""
_DRIFT = 1.2
"""How far the ratio of healthy steps may rise from what it was when the model was learned. Beyond,
it is the machine that has changed."""


class Mode:
    """What is known of one execution mode.

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
        """The last ones; the oldest is written over first."""
        self._num_ratios = 0
        self._num_seen = 0
        self._learned_ratio: float | None = None
        """Of healthy steps, when the model was learned; None for one that was not."""
        self._stages = _Stages()
        self._sum_ns = self._bounded_ns = 0
        self._has_slowed = False
        """Most recent steps take much longer than was healthy."""
        self._is_frozen = False

    @property
    def num_steps(self) -> int:
        """Return how many steps it was told of."""
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

    def is_trusted(self, batch: Batch) -> bool:
        """Return whether enough steps of its phases have taught the model to split a step."""
        if self.model.is_provisional:
            return False
        return not batch.team.chunks or not 0 < self.model.num_chunked < _ENOUGH_CHUNKED

    def begin_with(self, model: StepModel) -> None:
        """Put a better first guess in force, unless there is a fit already."""
        if self._learned_ratio is None and model is not self._first and not self._is_frozen:
            self.model = self._first = model
            self._fit.begin_with(model)
            self._num_ratios = 0  # they were of another model
            self.residual = None

    def observe(
        self,
        batch: Batch,
        *,
        measured_ns: int,
        modelled_ns: float,
        stages_ns: Sequence[int] = (),
    ) -> None:
        """Learn from a step that was not cold.

        Args:
            batch: its requests.
            measured_ns: its delay, over all stages.
            modelled_ns: what the model in force said.
            stages_ns: time of each stage of a pipeline.
        """
        self._sum_ns += measured_ns
        ratio = measured_ns / modelled_ns if modelled_ns > 0 else 1.0
        self._ratios[self._num_ratios % _RATIOS] = ratio
        self._num_ratios += 1
        self._num_seen += 1
        if self._num_seen % _RATIOS_AGAIN == 0 or self._num_seen == _ENOUGH_RATIOS:
            self._weigh()
        if self._is_frozen:
            return
        row, learned = features(batch), self._learned_ratio
        is_slow = learned is not None and (
            ratio > _SLOW * learned
            or self._stages.is_slow(stages_ns, _SLOW * learned * modelled_ns)
        )
        if is_slow and (self._has_slowed or self._fit.knows(row)):
            return
        self._stages.observe(stages_ns)
        if measured_ns > 0 and self._fit.observe(row, measured_ns):
            model = self._fit.solve()
            if model is not None:
                self._take(model)

    def note_bounded(self, bounded_ns: int) -> None:
        """Note what measured steps took off a member's own part, of a step that was not cold."""
        self._bounded_ns += bounded_ns

    def _take(self, model: StepModel) -> None:
        """Put a model in force that was fitted to the last steps."""
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
        """Add a healthy step; one stage alone has nothing to be compared with."""
        whole_ns = sum(stages_ns)
        if len(stages_ns) < 2 or not whole_ns:
            return
        if len(stages_ns) != self._shares.shape[1]:
            self._num, self._usual = 0, []
            self._shares = np.zeros((_RATIOS, len(stages_ns)))
        self._shares[self._num % _RATIOS] = np.divide(stages_ns, whole_ns)
        self._num += 1

    def settle(self) -> None:
        """Take the median shares of the last steps for usual."""
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
        """Start with no shape known."""
        self._peaks = peaks_of("")
        self._shape: Shape | None = None
        self._roofline = roofline(None, self._peaks)
        self._tables: dict[tuple[str, bool], CostTable] = {}
        """By mode, and whether they are of steps or of a device's rates."""
        self._calibrated: dict[str, StepModel] = {}
        """By mode; "" for all."""
        self._modes: dict[str, Mode] = {}
        self.pure_steps = PureSteps()
        self._is_frozen = False

    def describe(self, info: EngineInfo) -> None:
        """Take the model's shape and device from the engine's own words."""
        self._shape, self._peaks = info.shape, peaks_of(info.device, info.num_threads)
        if not self._is_frozen:
            self.pure_steps = PureSteps()
        self._roofline = roofline(self._shape, self._peaks)
        self._calibrated = {}
        # Steps of another model say nothing of this one's; the device is the same.
        self._tables = {key: table for key, table in self._tables.items() if not key[1]}
        for table in self._tables.values():
            self._take(table)
        self._restart()

    def calibrate(self, table: CostTable) -> bool:
        """Begin with what was measured on this device; return False for a table without sense.

        Keyframes tell it again and again: what is known already changes nothing. Rates say nothing
        of a shape that is not counted, or not known yet; they are kept for another.
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

    def learn(
        self,
        mode: Mode,
        batch: Batch,
        prefills: list[int],
        *,
        measured_ns: int,
        modelled_ns: float,
        stages_ns: Sequence[int],
    ) -> None:
        """Learn from a step that was not cold; see `Mode.observe`."""
        if not self._is_frozen:
            self.pure_steps.observe(batch, prefills, measured_ns)
        mode.observe(
            batch,
            measured_ns=measured_ns,
            modelled_ns=modelled_ns,
            stages_ns=stages_ns,
        )

    @property
    def memory_peaks(self) -> dict[str, float]:
        """Return what the device's memory can do, in bytes per second: `spec` and `measured`.

        The first is its maker's word, the second a calibration's; what nobody knows is not there.
        """
        told = {"spec": self._peaks.memory_bytes_s} if self._peaks.is_known else {}
        rates = self._tables.get(("", False))
        measured = rates.coefficients.get("read_bytes_s") if rates is not None else None
        return told | ({"measured": measured} if measured else {})

    @property
    def compute_peaks(self) -> dict[str, float]:
        """Return what a device can compute of this model, FLOPs per second: likewise.

        In what the model's activations are: a maker tells nothing of 32 bits.
        """
        shape = self._shape
        if shape is None:
            return {}
        by_bits = {8: self._peaks.fp8_flops_s, 16: self._peaks.bf16_flops_s}
        spec = by_bits.get(shape.activation_bits) if self._peaks.is_known else None
        rates = self._tables.get(("", False))
        measured = None if rates is None else measured_flops_s(rates.coefficients, shape)
        told = {"spec": spec} if spec else {}
        return told | ({"measured": measured} if measured else {})

    def _take(self, table: CostTable) -> None:
        """Make the model of a table; measured steps go before what follows from rates."""
        model = model_of(table, self._shape, self._peaks)
        held = self._tables.get((table.mode, True))
        if model is not None and (held is None or is_of_steps(table)):
            self._calibrated[table.mode] = model

    def _restart(self) -> None:
        """Put the best first guess in force for the modes that have no fit yet."""
        for name, mode in self._modes.items():
            mode.begin_with(self._first(name))

    def _first(self, name: str) -> StepModel:
        """Return what a mode starts with."""
        return self._calibrated.get(name) or self._calibrated.get("") or self._roofline

    def bounds(self, mode: Mode, batch: Batch, prefills: list[int]) -> Bounds | None:
        """Return what measured steps say a step's members take alone at most.

        A model that few steps have taught is bounded for all of them, another one for prefills: it
        knows those of their size from extrapolation only, where most prompts are long. Steps of
        all modes count, for a member alone would have run in the mode of its own.
        """
        if len(batch.context) < 2:
            return None
        if mode.is_trusted(batch):
            return self.pure_steps.bounds(batch, prefills)
        return self.pure_steps.bounds_of_all(batch)

    def mode(self, name: str) -> Mode:
        """Return what is known of an execution mode."""
        mode = self._modes.get(name)
        if mode is None:
            mode = self._modes[name] = Mode(name, self._first(name))
        return mode

    @property
    def modes(self) -> Mapping[str, Mode]:
        """Return all modes that were asked for, by name; the ones with the most steps first."""
        by_steps = sorted(self._modes.items(), key=lambda item: (-item[1].num_steps, item[0]))
        return dict(by_steps)
