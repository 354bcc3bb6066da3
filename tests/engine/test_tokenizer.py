from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from inferscope.engine.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    TextStream,
    encode_sections,
)
from inferscope.errors import BadInput


@pytest.fixture(scope="module")
def file_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 5, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    inner.save(str(path))
    return FileTokenizer(path)


TEXT = st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]))


@given(text=TEXT)
def test_bytes_come_back_as_text(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_comes_back_from_a_file_tokenizer(file_tokenizer: FileTokenizer) -> None:
    text = "the fox über 犬 🦊"
    ids = file_tokenizer.encode(text)
    assert file_tokenizer.decode(ids) == text
    assert max(ids) < file_tokenizer.num_tokens


@given(text=TEXT)
def test_bytes_of_tokens_are_those_of_the_text(file_tokenizer: FileTokenizer, text: str) -> None:
    for tokenizer in (file_tokenizer, ByteTokenizer()):
        ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    end = file_tokenizer.encode("<|end|>")
    assert b"".join(map(file_tokenizer.token_bytes, end)) == b"<|end|>"


def test_bytes_of_tokens_of_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "<0xC3>", "<0xA9>", "\u2581the", "\u2581", "fox"]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True
        )
    )
    inner.add_special_tokens(["<s>"])
    decoders = tokenizers.decoders
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    found = [tokenizer.token_bytes(token) for token in range(len(pieces))]
    assert found == [b"<unk>", b"<s>", b"\xc3", b"\xa9", b" the", b" ", b"fox"]
    assert tokenizer.decode([4, 6, 2, 3]) == "thefoxé"


CUT = st.lists(
    st.tuples(st.sampled_from("abc"), st.text("the fox\u00e9\u72ac", max_size=9)), min_size=1
)


@given(pieces=CUT)
def test_sections_are_counted_in_the_tokens_of_the_whole(
    file_tokenizer: FileTokenizer, pieces: list[tuple[str, str]]
) -> None:
    text = "".join(piece for _, piece in pieces)
    sections = tuple((name, len(piece)) for name, piece in pieces)
    ids, counted = encode_sections(ByteTokenizer(), text, sections)
    assert ids == list(text.encode())
    assert counted == tuple((name, len(piece.encode())) for name, piece in pieces)
    ids, counted = encode_sections(file_tokenizer, text, sections)
    assert ids == file_tokenizer.encode(text)
    assert [name for name, _ in counted] == [name for name, _ in pieces]
    assert sum(num for _, num in counted) == len(ids)
    at = begin = 0
    for (_, num), (_, piece) in zip(counted, pieces, strict=True):
        at, begin = at + num, begin + len(piece)
        # The tokens before a cut decode to text that reaches it; without the last one it does not.
        assert len(file_tokenizer.decode(ids[:at])) >= begin
        assert not num or len(file_tokenizer.decode(ids[: at - 1]).rstrip("\ufffd")) < begin


def test_counting_bytes_takes_time_in_proportion_to_the_text() -> None:
    def counting_s(num_sections: int) -> float:
        text, sections = "犬 a" * num_sections, (("a", 3),) * num_sections
        began_s = time.thread_time()
        assert encode_sections(ByteTokenizer(), text, sections)[1] == (("a", 5),) * num_sections
        return time.thread_time() - began_s

    few_s = max(counting_s(1000) for _ in range(2))
    assert min(counting_s(8000) for _ in range(2)) < 24 * few_s


@given(text=TEXT, width=st.integers(1, 3))
def test_stream_emits_whole_characters_and_all_of_them(text: str, width: int) -> None:
    ids = ByteTokenizer().encode(text)
    stream = TextStream(ByteTokenizer())
    pieces = [stream.push(ids[i : i + width]) for i in range(0, len(ids), width)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.finish() == text


def test_stream_of_a_file_tokenizer_emits_whole_characters(file_tokenizer: FileTokenizer) -> None:
    stream = TextStream(file_tokenizer)
    pieces = [stream.push([token]) for token in file_tokenizer.encode("a 🦊 b")]
    assert "".join(pieces) == "a 🦊 b"
    assert "🦊" in "".join(pieces).split()
    assert all("\ufffd" not in piece for piece in pieces)


def test_stream_emits_invalid_bytes_as_replacements() -> None:
    stream = TextStream(ByteTokenizer())
    pieces = [stream.push([0xFF]) for _ in range(20)]
    assert "".join(pieces) + stream.finish() == "\ufffd" * 20
    assert any(pieces)


def test_stream_finishes_with_half_a_character() -> None:
    stream = TextStream(ByteTokenizer())
    assert stream.push("é".encode()[:1]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_special_tokens_are_not_text(file_tokenizer: FileTokenizer) -> None:
    assert file_tokenizer.encode("<|end|>") == [0]
    assert file_tokenizer.decode([0]) == ""


@pytest.mark.parametrize("text", ["a 🦊 b", "🦊" * 9, "a"])
@pytest.mark.parametrize("num_special", [1, 8, 9, 500])
def test_a_stream_keeps_few_of_the_tokens_without_a_text(
    file_tokenizer: FileTokenizer, text: str, num_special: int
) -> None:
    lengths: list[int] = []

    class Counting(FileTokenizer):
        def decode(self, ids: Sequence[int]) -> str:
            lengths.append(len(ids))
            return super().decode(ids)

    counting = Counting.__new__(Counting)
    vars(counting).update(vars(file_tokenizer))
    stream = TextStream(counting)
    ids = file_tokenizer.encode(text)
    given = [token for each in ids for token in (each, *[0] * num_special)]
    assert stream.push(given) + stream.finish() == file_tokenizer.decode(given)
    assert max(lengths) < 40


def test_ids_beyond_the_vocabulary_wrap_around(file_tokenizer: FileTokenizer) -> None:
    assert file_tokenizer.decode([5 + file_tokenizer.num_tokens]) == file_tokenizer.decode([5])


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        FileTokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match="cannot read"):
        FileTokenizer(tmp_path / "tokenizer.json")


def test_a_long_text_is_encoded_beside_other_threads(file_tokenizer: FileTokenizer) -> None:
    encoding = threading.Thread(target=file_tokenizer.encode, args=("the lazy dog " * 50_000,))
    encoding.start()
    num_turns = 0
    while encoding.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 20
