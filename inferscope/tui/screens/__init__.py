"""Screens: layout and keys. What a panel shows is a pure function, elsewhere."""

from inferscope.tui.screens.detail import DetailScreen
from inferscope.tui.screens.engine import EngineScreen
from inferscope.tui.screens.fleet import FleetScreen
from inferscope.tui.screens.help import HelpScreen
from inferscope.tui.screens.kernels import KernelScreen
from inferscope.tui.screens.methods import MethodScreen
from inferscope.tui.screens.overview import OverviewScreen
from inferscope.tui.screens.pair import PairScreen
from inferscope.tui.screens.roofline import RooflineScreen
from inferscope.tui.screens.scene_screen import SceneScreen
from inferscope.tui.screens.slo import SloScreen
from inferscope.tui.screens.timeline import TimelineScreen

SCREENS: tuple[type[SceneScreen], ...] = (
    OverviewScreen,
    TimelineScreen,
    RooflineScreen,
    SloScreen,
    EngineScreen,
    FleetScreen,
)
"""Screens behind the number keys, in the order of their tabs; the first is the one that opens."""

__all__ = [
    "SCREENS",
    "DetailScreen",
    "HelpScreen",
    "KernelScreen",
    "MethodScreen",
    "OverviewScreen",
    "PairScreen",
    "SceneScreen",
    "TimelineScreen",
]
