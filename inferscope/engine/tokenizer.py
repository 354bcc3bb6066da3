"""Text to token ids and back, and text that grows as tokens arrive.

A token may end in the middle of a UTF-8 character. `TextStream` holds such a tail back until the
character is whole, so that what it emits can be written to a client as it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import tokenizers

from inferscope.errors import BadInput

# What a decoder puts in place of bytes that are not UTF-8, half a character among them.
_REPLACEMENT = "\ufffd"
# The most that can still become text: a decoder with byte fallback shows a whole run of bytes as
# broken while its last character is, and a run seen here is one character and part of the next.
_MAX_BROKEN = 7
# Tokens without a text (special ones, which some models repeat for ever after their end) are kept
# up to this number: each token decodes again all that are held back.
_MAX_HELD = 8


Sections: TypeAlias = tuple[tuple[str, int], ...]
"""Of a text, or of its tokens: names, and how much of it each has, in order."""


class Tokenizer(Protocol):
    """What the engine's front ends need of a tokenizer."""

    @property
    def num_tokens(self) -> int:
        """Ids are below this."""

    def encode(self, text: str) -> list[int]:
        """Return the text's tokens, special tokens recognised, none added."""

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's tokens."""

    def encode_cut(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the text's tokens, and how many of them begin before each cut.

        Args:
            text: to encode.
            cuts: positions in it, in characters, ascending.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the tokens' text without special tokens; broken characters become U+FFFD."""


def encode_sections(
    tokenizer: Tokenizer, text: str, sections: Sections
) -> tuple[list[int], Sections]:
    """Return a text's tokens, and how many of them each section has; they sum to all.

    A token belongs to the section that it begins in.

    Args:
        tokenizer: of the model.
        text: to encode, as a whole: sections are tokenised together as the model reads them.
        sections: of the text, in characters, all of it.
    """
    ends = list(accumulate(length for _, length in sections))
    ids, counts = tokenizer.encode_cut(text, ends[:-1])
    edges = [0, *counts, len(ids)]
    names = [name for name, _ in sections]
    return ids, tuple(
        (name, until - since) for name, (since, until) in zip(names, pairwise(edges), strict=True)
    )


class FileTokenizer:
    """A Hugging Face `tokenizer.json`.

    Ids beyond the file's own are folded into it, so that a random model with a larger vocabulary
    still writes visible text.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise BadInput(
                f"{path} does not exist. Download the checkpoint again with its tokenizer.json."
            )
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(path))
        # The bindings raise plain Exception for every kind of damage.
        except Exception as error:
            raise BadInput(f"cannot read {path}: {error}. Download it again.") from None

    @property
    def num_tokens(self) -> int:
        """Ids are below this."""
        return int(self._inner.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Return the text's tokens, special tokens recognised, none added."""
        (ids,) = self.encode_all([text])
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's tokens."""
        # As a batch: only that lets other threads run meanwhile, which is a second for a megabyte.
        return [encoded.ids for encoded in self._encoded(texts)]

    def encode_cut(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the text's tokens, and how many of them begin before each cut."""
        (encoded,) = self._encoded([text])
        ids: list[int] = encoded.ids

        def begin(token: int) -> int:
            chars = encoded.token_to_chars(token)
            return 0 if chars is None else int(chars[0])

        return ids, [bisect_left(range(len(ids)), cut, key=begin) for cut in cuts]

    def _encoded(self, texts: Sequence[str]) -> Any:
        return self._inner.encode_batch(list(texts), add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the tokens' text without special tokens; broken characters become U+FFFD."""
        num_tokens = self.num_tokens
        text: str = self._inner.decode([token % num_tokens for token in ids])
        return text


class ByteTokenizer:
    """One token per UTF-8 byte, for models too small for a vocabulary of words."""

    num_tokens = 256

    def encode(self, text: str) -> list[int]:
        """Return the text's UTF-8 bytes."""
        return list(text.encode())

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's UTF-8 bytes."""
        return [self.encode(text) for text in texts]

    def encode_cut(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the text's UTF-8 bytes, and how many of them stand before each cut."""
        widths = (len(text[a:b].encode()) for a, b in pairwise([0, *cuts]))
        return self.encode(text), list(accumulate(widths))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the bytes as text, ids beyond a byte folded into one."""
        return bytes(token % 256 for token in ids).decode(errors="replace")


class TextStream:
    """The text of a growing sequence of tokens, in pieces that never end within a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_emitted = 0

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens and return the text that they complete, which may be empty."""
        return "".join(self._add(token) for token in ids)

    def finish(self) -> str:
        """Return what is held back, broken as it is."""
        held = self._held()
        self._num_emitted = len(self._ids)
        return held

    def _add(self, token: int) -> str:
        self._ids.append(token)
        held = self._held()
        num_broken = len(held) - len(held.rstrip(_REPLACEMENT))
        if not held or 0 < num_broken <= _MAX_BROKEN:
            is_long = len(self._ids) - self._num_emitted > _MAX_HELD
            if is_long and not self._tokenizer.decode((token,)):
                self._ids.pop()
            return ""
        self._ids = self._ids[self._num_emitted :]
        self._num_emitted = len(self._ids)
        return held

    def _held(self) -> str:
        # Decoded together with the tokens emitted last, because a decoder may treat the first token
        # of a text differently (the space that SentencePiece drops).
        shown = self._tokenizer.decode(self._ids[: self._num_emitted])
        return self._tokenizer.decode(self._ids)[len(shown) :]
