"""Conversion between text and token ids, whole or as tokens arrive.

A token may end within a UTF-8 character. `TextStream` holds such a tail back until the character is
complete, so that its output can be written to a client.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import tokenizers

from inferscope.errors import BadInput

_META_SPACE = "\u2581"
"""A space in SentencePiece's vocabularies."""
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
"""A byte in SentencePiece's vocabularies."""
# A decoder replaces bytes that are not UTF-8, including half a character, by this.
_REPLACEMENT = "\ufffd"
# A longer broken run cannot become text: a decoder with byte fallback shows a whole run of bytes as
# broken while its last character is incomplete, and such a run is at most one character and part of
# the next.
_MAX_BROKEN = 7
# Tokens without text (special tokens, which some models repeat after their end) are kept up to this
# number, because each new token decodes all held tokens again.
_MAX_HELD = 8


Sections: TypeAlias = tuple[tuple[str, int], ...]
"""Names and lengths of consecutive sections of a text, in characters or tokens."""


class Tokenizer(Protocol):
    """Interface of a tokenizer for the engine's front ends."""

    @property
    def num_tokens(self) -> int:
        """Number of token ids; all ids are below it."""

    def encode(self, text: str) -> list[int]:
        """Return the text's tokens; special tokens in it are recognized, none are added."""

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's tokens."""

    def encode_cut(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the text's tokens and, for each cut, how many of them begin before it.

        Args:
            text: text to encode.
            cuts: ascending character positions in the text.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the tokens' text without special tokens; invalid UTF-8 becomes U+FFFD."""

    def token_bytes(self, token: int) -> bytes:
        """Return a token's UTF-8 bytes, which may end within a character.

        A special token has those of its name.
        """


def encode_sections(
    tokenizer: Tokenizer, text: str, sections: Sections
) -> tuple[list[int], Sections]:
    """Return a text's tokens and the sections in tokens, which sum to all tokens.

    A token belongs to the section in which it begins.

    Args:
        tokenizer: tokenizer of the model.
        text: text to encode; it is tokenized as a whole, as the model reads it.
        sections: sections that cover the text, in characters.
    """
    ends = list(accumulate(length for _, length in sections))
    ids, counts = tokenizer.encode_cut(text, ends[:-1])
    edges = [0, *counts, len(ids)]
    names = [name for name, _ in sections]
    return ids, tuple(
        (name, until - since) for name, (since, until) in zip(names, pairwise(edges), strict=True)
    )


class FileTokenizer:
    """Tokenizer read from a Hugging Face `tokenizer.json`.

    Larger ids are taken modulo its number of tokens, so that a random model with a larger
    vocabulary still produces visible text.
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
        self._added = self._inner.get_added_tokens_decoder()
        decoder = json.dumps(json.loads(self._inner.to_str())["decoder"])
        self._byte_by_char = _byte_by_char() if '"ByteLevel"' in decoder else {}

    @property
    def num_tokens(self) -> int:
        """Number of token ids; all ids are below it."""
        return int(self._inner.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Return the text's tokens; special tokens in it are recognized, none are added."""
        (ids,) = self.encode_all([text])
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's tokens."""
        # Only batch encoding releases the GIL, and a megabyte takes a second.
        return [encoded.ids for encoded in self._encoded(texts)]

    def encode_cut(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the text's tokens and, for each cut, how many of them begin before it."""
        (encoded,) = self._encoded([text])
        ids: list[int] = encoded.ids

        def begin(token: int) -> int:
            chars = encoded.token_to_chars(token)
            return 0 if chars is None else int(chars[0])

        return ids, [bisect_left(range(len(ids)), cut, key=begin) for cut in cuts]

    def _encoded(self, texts: Sequence[str]) -> Any:
        return self._inner.encode_batch(list(texts), add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the tokens' text without special tokens; invalid UTF-8 becomes U+FFFD."""
        num_tokens = self.num_tokens
        text: str = self._inner.decode([token % num_tokens for token in ids])
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return a token's UTF-8 bytes, which may end within a character."""
        token %= self.num_tokens
        piece: str = self._inner.id_to_token(token) or ""
        if token not in self._added:
            if self._byte_by_char:
                return bytes(self._byte_by_char[char] for char in piece)
            if byte := _BYTE_PIECE.fullmatch(piece):
                return bytes.fromhex(byte[1])
            piece = piece.replace(_META_SPACE, " ")
        return piece.encode()


def _byte_by_char() -> dict[str, int]:
    """Return the byte of each character in the vocabulary of a byte-level tokenizer.

    Printable bytes of Latin-1 are their own characters, and the others follow from U+0100 on.
    Source: `bytes_to_unicode` in OpenAI's gpt-2, src/encoder.py.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in own]
    return {chr(byte): byte for byte in own} | {
        chr(0x100 + number): byte for number, byte in enumerate(others)
    }


class ByteTokenizer:
    """Tokenizer with one token per UTF-8 byte, for small vocabularies."""

    num_tokens = 256

    def encode(self, text: str) -> list[int]:
        """Return the text's UTF-8 bytes."""
        return list(text.encode())

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's UTF-8 bytes."""
        return [self.encode(text) for text in texts]

    def encode_cut(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the text's UTF-8 bytes and, for each cut, how many of them precede it."""
        widths = (len(text[a:b].encode()) for a, b in pairwise([0, *cuts]))
        return self.encode(text), list(accumulate(widths))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the bytes as text; larger ids are taken modulo 256."""
        return bytes(token % 256 for token in ids).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the token's byte."""
        return bytes((token % 256,))


class TextStream:
    """Text of a growing token sequence, in pieces of whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_emitted = 0

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens and return the text that they complete; it may be empty."""
        return "".join(self._add(token) for token in ids)

    def finish(self) -> str:
        """Return the text held back, with incomplete characters replaced."""
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
        # Decoded with the previous tokens, because a decoder may treat the first token of a text
        # differently (SentencePiece drops its space).
        shown = self._tokenizer.decode(self._ids[: self._num_emitted])
        return self._tokenizer.decode(self._ids)[len(shown) :]
