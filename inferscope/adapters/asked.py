"""What was asked of a request's sampling, as attributes of its record.

By the time an adapter sees a request its engine has filled in the defaults that it has for what the
client left out, so each number is the one in force. What an engine does not tell is left out, and
so is what is switched off (every token is a candidate, no penalty, one answer, no seed): nobody
need have asked for that.
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
"""By attribute, the engines' numbers for none; those of top_k are HF's and vLLM's, and SGLang's. No
tokens are asked of what only embeds."""


def asked(numbers: Mapping[str, object], *, is_stream: bool | None = None) -> dict[str, str]:
    """Return the attributes of a request.

    Args:
        numbers: by attribute, what an engine keeps under it, whatever that is.
        is_stream: the answer comes as it is made; None where that is not known.
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
