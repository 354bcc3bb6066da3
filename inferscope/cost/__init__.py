"""Cost of a step from its shape: FLOPs, bytes, and the model of its time."""

from inferscope.cost.book import CostBook, Mode, is_sure_of, ratios_of
from inferscope.cost.counts import Rates, rates_of, saved_ns
from inferscope.cost.fit import REMEMBERED_STEPS, OnlineFit, features
from inferscope.cost.flops import FlopRates
from inferscope.cost.hbm import WeightBytes
from inferscope.cost.model import ENOUGH_STEPS, StepModel, look_up
from inferscope.cost.peaks import Peaks, peaks_of
from inferscope.cost.pure_steps import TOLERANCE, Bounds, PureStep
from inferscope.cost.routing import even_busiest
from inferscope.cost.shape import TIME_ONLY, pairs, visible
from inferscope.cost.step_table import Grid, RowsOfMembers, StepTable, cut_into_steps, product
from inferscope.cost.table import coefficients
from inferscope.cost.verdict import RESIDUAL_STEPS, residual_of, split_verdict

__all__ = [
    "ENOUGH_STEPS",
    "REMEMBERED_STEPS",
    "RESIDUAL_STEPS",
    "TIME_ONLY",
    "TOLERANCE",
    "Bounds",
    "CostBook",
    "FlopRates",
    "Grid",
    "Mode",
    "OnlineFit",
    "Peaks",
    "PureStep",
    "Rates",
    "RowsOfMembers",
    "StepModel",
    "StepTable",
    "WeightBytes",
    "coefficients",
    "cut_into_steps",
    "even_busiest",
    "features",
    "is_sure_of",
    "look_up",
    "pairs",
    "peaks_of",
    "product",
    "rates_of",
    "ratios_of",
    "residual_of",
    "saved_ns",
    "split_verdict",
    "visible",
]
