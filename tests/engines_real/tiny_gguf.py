"""Writes a random Llama of two layers, whose vocabulary is the bytes, as a GGUF file.

Runs in an environment with `gguf` and numpy: python tiny_gguf.py FILE
"""

from __future__ import annotations

import sys

import gguf
import numpy as np

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN = 2, 64, 4, 2, 128
_SPECIAL = ("<unk>", "<s>", "</s>")
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6


def write(path: str) -> None:
    """Write the file."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(1024)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, _NORMAL])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    _add_weights(writer, len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_weights(writer: gguf.GGUFWriter, num_tokens: int) -> None:
    generator = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        scale = shape[-1] ** -0.5
        weights = generator.normal(0, scale, shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", weights)

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))

    add("token_embd", num_tokens, HIDDEN)
    add("output", num_tokens, HIDDEN)
    add_norm("output_norm")
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        add_norm(f"{block}.attn_norm")
        add_norm(f"{block}.ffn_norm")
        add(f"{block}.attn_q", HIDDEN, HIDDEN)
        add(f"{block}.attn_k", HIDDEN * KV_HEADS // HEADS, HIDDEN)
        add(f"{block}.attn_v", HIDDEN * KV_HEADS // HEADS, HIDDEN)
        add(f"{block}.attn_output", HIDDEN, HIDDEN)
        add(f"{block}.ffn_gate", FFN, HIDDEN)
        add(f"{block}.ffn_up", FFN, HIDDEN)
        add(f"{block}.ffn_down", HIDDEN, FFN)


if __name__ == "__main__":
    write(sys.argv[1])
