"""Sampling parameters of a request, as attributes of its record.

An engine fills in its defaults before an adapter sees the request, so each value is the one in
force. Values that an engine does not expose are omitted, and so are disabled parameters (every
token is a candidate, no penalty, one answer, no seed): a client need not have set them.
"""

from __future__ import annotations

from collections.abc import Mapping

_OFF: Mapping[str, tuple[float, ...]] = {
    "max_tokens": (0,),
    "top_p": (1,),
    "top_k": (0, -1, 1 << 30),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "n": (1,),
}
"""Values that disable a parameter, by attribute; for `top_k` those of transformers and vLLM, then
SGLang's. An embedding request generates 0 tokens."""


def asked(numbers: Mapping[str, object], *, is_stream: bool | None = None) -> dict[str, str]:
    """Return the sampling attributes of a request.

    Args:
        numbers: the engine's values by attribute; those that are not numbers are omitted.
        is_stream: whether the response streams; None if that is unknown.
    """
    found = {} if is_stream is None else {"stream": "true" if is_stream else "false"}
    for word, number in numbers.items():
        if (
            isinstance(number, (int, float))
            and not isinstance(number, bool)
            and number not in _OFF.get(word, ())
        ):
            found[word] = str(number)
    return found
