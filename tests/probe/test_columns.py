from __future__ import annotations

import subprocess
import sys
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.probe.columns import (
    OddValues,
    attributes,
    column,
    digest64,
    index_column,
    name,
    text,
)
from inferscope.records import RequestEvent, decode, encode


@given(st.sampled_from(["B", "H", "I"]), st.lists(st.integers(0, 255), max_size=200))
def test_a_column_is_the_same_whatever_it_is_made_from(code: str, values: list[int]) -> None:
    expected = array(code, values).tobytes()
    assert column(code, values) == column(code, tuple(values)) == expected
    assert column(code, array(code, values)) == column(code, np.array(values, "i8")) == expected
    assert column(code, expected) == expected
    assert column(code, bytearray(expected)) == expected  # type: ignore[arg-type]


@given(st.lists(st.integers(-2, 2**32 + 1) | st.floats(-2, 9), max_size=20))
def test_only_a_whole_number_in_range_is_an_index(values: list[float]) -> None:
    odd = OddValues()
    made = memoryview(index_column(values, odd)).cast("I").tolist()  # type: ignore[arg-type]
    is_index = [value == int(value) and 0 <= value < 2**32 for value in values]
    both = list(zip(values, is_index, strict=True))
    assert made == [int(value) if fits else 2**32 - 1 for value, fits in both]
    assert odd.num == is_index.count(False)


@pytest.mark.parametrize(("code", "largest"), [("B", 255), ("H", 65535), ("I", 2**32 - 1)])
def test_a_number_too_large_for_its_column_becomes_the_largest(code: str, largest: int) -> None:
    for values in ([1, largest + 1, -3], (1, largest + 1, -3)):
        assert column(code, values) == array(code, [1, largest, 0]).tobytes()


CONVERSION = """
from decimal import Decimal
from inferscope.probe.columns import OddValues, whole
odd = OddValues()
print(*(whole(Decimal(each), -5, 9, odd) for each in ("1E999999", "-1E999999", "7")), odd.num)
"""


def test_a_decimal_with_a_large_exponent_is_clamped_before_it_is_converted() -> None:
    done = subprocess.run(  # its conversion to an integer takes minutes and cannot be interrupted
        [sys.executable, "-c", CONVERSION], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["9", "-5", "7", "2"]


def test_the_digest_distinguishes_requests_tokens_and_their_order() -> None:
    a, b = column("I", [1, 2]), column("I", [3, 4])
    assert len({digest64(a, b), digest64(b, a), digest64(a, a), digest64(a[::-1], b)}) == 4
    assert 0 <= digest64(a, b) < 1 << 64


@given(st.text(alphabet=st.characters(), max_size=300))
def test_any_text_becomes_one_that_a_record_can_hold(given_text: str) -> None:
    for made in (text(given_text), name(given_text)):
        assert len(made.encode()) <= 128
        event = RequestEvent(1, 2, 3, 4, made)
        assert decode(event.CODE, encode(event)) == event


def test_names_cut_short_still_differ() -> None:
    assert name("x" * 1000 + "a") != name("x" * 1000 + "b")
    assert name("\ud800") != name("\udfff")
    assert name("plain") == "plain"
    assert name(7) == "7"


def test_attributes_are_bounded() -> None:
    many = attributes({f"key {i}" + "k" * 500: "v" * 500 for i in range(100)})
    assert many is not None
    assert len(many) == 16
    assert all(len(key) <= 128 and len(value) <= 128 for key, value in many.items())
    assert attributes({}) is None
