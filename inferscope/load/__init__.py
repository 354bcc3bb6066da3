"""Open-loop load generator: realistic prompts that arrive independently of the server's pace."""

from inferscope.load.arrivals import bursts, poisson
from inferscope.load.chunks import Endpoint
from inferscope.load.http import HttpClient, HttpOptions, open_session
from inferscope.load.lengths import FORMS, Lengths, parse_lengths
from inferscope.load.open_loop import ClientTimes, OpenLoop, ReceivedTokens
from inferscope.load.pacing import INTERVAL_S, Pacing, from_now_on
from inferscope.load.planning import MIX, Composer, of_kind, of_lengths, plan, stream
from inferscope.load.prompts import WordPrompts
from inferscope.load.report import LoadDocument, live_line, summary_text
from inferscope.load.server import TokenizerRatio, find_model, measure_tokens_per_word, server_url
from inferscope.load.summary import LoadStats, LoadSummary
from inferscope.load.workload import KINDS, PlannedRequest, Workload

__all__ = [
    "FORMS",
    "INTERVAL_S",
    "KINDS",
    "MIX",
    "ClientTimes",
    "Composer",
    "Endpoint",
    "HttpClient",
    "HttpOptions",
    "Lengths",
    "LoadDocument",
    "LoadStats",
    "LoadSummary",
    "OpenLoop",
    "Pacing",
    "PlannedRequest",
    "ReceivedTokens",
    "TokenizerRatio",
    "WordPrompts",
    "Workload",
    "bursts",
    "find_model",
    "from_now_on",
    "live_line",
    "measure_tokens_per_word",
    "of_kind",
    "of_lengths",
    "open_session",
    "parse_lengths",
    "plan",
    "poisson",
    "server_url",
    "stream",
    "summary_text",
]
