from __future__ import annotations

from collections.abc import Sequence

from inferscope.engine.conversation import Conversation
from inferscope.engine.request import TokenLogprobs
from inferscope.engine.tokenizer import ByteTokenizer
from inferscope.records import RequestIndex


def conversation(stops: Sequence[str] = (), min_tokens: int = 0) -> Conversation:
    return Conversation(
        RequestIndex(0), ByteTokenizer(), lambda: None, stops=stops, min_tokens=min_tokens
    )


def test_undelivered_text_is_merged_for_a_slow_client() -> None:
    talk = conversation()
    talk.push(list(b"one "), None)
    talk.push(list(b"two"), "length")
    delivery = talk.take()
    assert delivery is not None
    assert (delivery.text, delivery.num_tokens, delivery.finish) == ("one two", 7, "length")
    assert talk.take() is None


def test_stop_string_across_tokens_ends_the_text_and_sets_is_cut() -> None:
    talk = conversation(["STOP"])
    for byte in b"go STO":
        talk.push([byte], None)
    talk.push(list(b"P and on"), None)
    delivery = talk.take()
    assert delivery is not None
    assert (delivery.text, delivery.finish) == ("go ", "stop")
    assert talk.num_tokens == len("go STOP")
    assert talk.is_over
    assert talk.is_cut
    talk.push(list(b"late"), "length")
    assert talk.take() is None


def test_text_held_back_for_a_stop_string_is_delivered_at_the_end() -> None:
    talk = conversation(["STOP"])
    talk.push(list(b"go ST"), None)
    delivery = talk.take()
    assert delivery is not None
    assert (delivery.text, delivery.num_tokens) == ("go ", 5)
    talk.push([], "length")
    delivery = talk.take()
    assert delivery is not None
    assert (delivery.text, delivery.num_tokens, delivery.finish) == ("ST", 0, "length")
    assert not talk.is_cut


def test_stop_strings_are_ignored_in_the_first_min_tokens() -> None:
    talk = conversation(["a"], min_tokens=3)
    talk.push(list(b"aaab"), None)
    talk.push(list(b"a"), None)
    delivery = talk.take()
    assert delivery is not None
    assert (delivery.text, delivery.finish) == ("aaab", "stop")


def test_log_probabilities_are_delivered_with_their_tokens_and_where_these_begin() -> None:
    talk = conversation(["STOP"])
    for text in (b"a\xc3", b"\xa9bS"):
        talk.push(list(text), None, [TokenLogprobs(byte, -1.0, []) for byte in text])
    talk.push([ord("x")], "length", [TokenLogprobs(ord("x"), -2.0, [])])
    delivery = talk.take()
    assert delivery is not None
    assert delivery.text == "aébSx"
    assert [begin for begin, _ in delivery.scored] == [0, 1, 1, 2, 3, 4]
    assert bytes(one.token for _, one in delivery.scored) == "aébSx".encode()
    assert delivery.scored[-1].logprobs.logprob == -2.0


def test_log_probabilities_end_with_the_token_that_completes_a_stop_string() -> None:
    talk = conversation(["b"])
    talk.push(list(b"abc"), None, [TokenLogprobs(byte, -1.0, []) for byte in b"abc"])
    delivery = talk.take()
    assert delivery is not None
    assert (delivery.text, delivery.num_tokens, len(delivery.scored)) == ("a", 2, 2)
