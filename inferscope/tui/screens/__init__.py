"""Screens: layout and keys. What a panel shows is a pure function, elsewhere."""

from inferscope.tui.screens.detail import DetailScreen
from inferscope.tui.screens.help import HelpScreen
from inferscope.tui.screens.overview import OverviewScreen

__all__ = ["DetailScreen", "HelpScreen", "OverviewScreen"]
