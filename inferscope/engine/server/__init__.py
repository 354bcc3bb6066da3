"""OpenAI-compatible streaming server of the reference engine, in several processes.

                    ┌─ API server 0 ─┐
    clients ──HTTP──┼─ API server 1 ─┼──ZeroMQ── core: model, step loop
                    └─ …             ┘
              supervisor: starts and stops all processes

The API servers do all work outside the step loop: HTTP, templates, tokenization, detokenization,
stop strings. Per step, the core sends one message to each API server with outputs.
"""

from inferscope.engine.server.launch import ServeSettings, Supervisor, listen
from inferscope.engine.server.parent import Failed, listen_to_parent, send_to_parent

__all__ = [
    "Failed",
    "ServeSettings",
    "Supervisor",
    "listen",
    "listen_to_parent",
    "send_to_parent",
]
