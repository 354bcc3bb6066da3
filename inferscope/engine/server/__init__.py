"""The reference engine behind an OpenAI-compatible streaming API, in processes of their own.

                    ┌─ API server 0 ─┐
    clients ──HTTP──┼─ API server 1 ─┼──ZeroMQ── core: model, step loop
                    └─ …             ┘
              supervisor: starts them all, and ends them

What costs the step loop nothing happens in the API servers: HTTP, templates, tokenising,
detokenising, stop strings. Per step the core sends each of them one message.
"""
