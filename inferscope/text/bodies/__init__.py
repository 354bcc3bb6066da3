"""Bodies of whole screens: pure functions from a view and a size to lines of exactly that size."""

from inferscope.text.bodies.engine import engine_body
from inferscope.text.bodies.fleet import fleet_body
from inferscope.text.bodies.roofline import roofline_body, roofline_brief, roofline_kinds
from inferscope.text.bodies.slo import slo_body
from inferscope.text.bodies.timeline import SPAN_NS, timeline_body

__all__ = [
    "SPAN_NS",
    "engine_body",
    "fleet_body",
    "roofline_body",
    "roofline_brief",
    "roofline_kinds",
    "slo_body",
    "timeline_body",
]
