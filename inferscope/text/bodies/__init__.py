"""Bodies of whole screens: pure functions from a view and a size to lines of exactly that size."""

from inferscope.text.bodies.engine import engine_body
from inferscope.text.bodies.fleet import fleet_body
from inferscope.text.bodies.slo import slo_body

__all__ = ["engine_body", "fleet_body", "slo_body"]
