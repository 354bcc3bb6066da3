"""Digests of the first tokens of a prompt, by which a reader finds shared prefixes.

They only distinguish the prefixes of one process's prompts: the key is made when the process starts
and written nowhere, so texts cannot be tried against them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from inferscope.host_signals import pass_on
from inferscope.probe.columns import column
from inferscope.probe.host_log import warn
from inferscope.records import PREFIX_TOKENS

_TOKEN_BYTES = 4
_DIGEST_BYTES = 7
"""Fewer than eight: the number stays positive wherever integers have a sign."""


class PrefixDigests:
    """Digests of the prefixes of one process's prompts."""

    def __init__(self) -> None:
        import hashlib  # with OpenSSL: 5 ms that importing the probe need not take

        key = os.urandom(16)
        self._empty: Any
        try:
            self._empty = hashlib.blake2b(key=key, digest_size=_DIGEST_BYTES)
        except (AttributeError, ValueError):  # FIPS mode; readers only compare these digits
            self._empty = hashlib.sha256(key)

    def of(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return a digest for each of PREFIX_TOKENS that the prompt is as long as.

        Takes 50 µs for a prompt of 1024 tokens or more, on a busy machine.
        """
        raw = column("I", list(prompt[: PREFIX_TOKENS[-1]]))
        state = self._empty.copy()
        digests, done = [], 0
        for num_tokens in PREFIX_TOKENS:
            if len(prompt) < num_tokens:
                break
            state.update(raw[done : num_tokens * _TOKEN_BYTES])
            done = num_tokens * _TOKEN_BYTES
            digests.append(int.from_bytes(state.digest()[:_DIGEST_BYTES], "little"))
        return tuple(digests)


def prefix_digests() -> PrefixDigests | None:
    """Return the digests of this process's prompts; None, with a warning, where it has none."""
    try:
        return PrefixDigests()
    except Exception as error:
        pass_on(error)
        warn("prompts that begin alike are not recorded: %s: %s", type(error).__name__, error)
        return None
