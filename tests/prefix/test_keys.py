"""Laws of the keys that are computed for blocks."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array

from hypothesis import given
from hypothesis import strategies as st

from inferscope.prefix import block_keys, first_key, packed

WIDTH = 4


def test_keys_depend_on_all_tokens_before_and_the_namespace() -> None:
    raw = bytes(range(64))
    keys = block_keys(raw, WIDTH)
    assert len(set(keys)) == 16
    edited = block_keys(bytes([9]) + raw[1:], WIDTH)
    assert not set(keys) & set(edited)
    assert not set(keys) & set(block_keys(raw, WIDTH, first_key("salt")))
    assert block_keys(raw[:63], WIDTH) == keys[:15]
    assert block_keys(b"", WIDTH) == block_keys(raw[:3], WIDTH) == []


@given(st.binary(max_size=200), st.integers(0, 50))
def test_a_prompt_has_the_same_keys_in_parts(raw: bytes, done: int) -> None:
    keys = block_keys(raw, WIDTH)
    last = keys[done - 1] if 0 < done <= len(keys) else first_key()
    done = done if done <= len(keys) else 0
    assert keys[:done] + block_keys(raw[done * WIDTH :], WIDTH, last) == keys


def test_an_array_has_the_keys_of_its_bytes() -> None:
    cells = array("q", [5, -1, 2**40] * 8)
    assert block_keys(cells, 32) == block_keys(cells.tobytes(), 32)


def test_packed_keys_stand_one_after_another() -> None:
    keys = [1, -2, 2**62]
    assert array("q", packed(keys)).tolist() == keys
    assert packed([]) == b""


def test_processes_have_keys_of_their_own() -> None:
    code = "from inferscope.prefix import block_keys; print(block_keys(bytes(64), 4))"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    first, second = (
        subprocess.run(
            [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    )
    assert first != second
