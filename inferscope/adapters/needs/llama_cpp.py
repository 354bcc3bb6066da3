"""What `adapters/llama_cpp.py` needs of llama-cpp-python."""

from __future__ import annotations

from inferscope.adapters.needs.feature import Engine, Feature, Place

_LLAMA = "llama_cpp.llama:Llama"

LLAMA_CPP = Engine(
    "llama_cpp",
    "llama-cpp-python",
    "inferscope.observe(llama) in your script, or inferscope run -- CMD; "
    "for llama-server, its metrics page only: inferscope attach http://HOST:PORT",
    (
        Feature(
            "generate",
            (Place(f"{_LLAMA}.generate", ("tokens",)), Place(f"{_LLAMA}.eval", ("tokens",))),
            is_needed=True,
        ),
        Feature("completions", (Place(f"{_LLAMA}.create_completion"),)),
    ),
)
