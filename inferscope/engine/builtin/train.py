"""Train the model that ships with InferScope, and the draft model for its speculative decoding.

    python -m inferscope.engine.builtin.train OUT --minutes 22
    python -m inferscope.engine.builtin.train OUT --draft --minutes 9

The demo must answer real prompts on a laptop without downloads, so the package contains a
1.3 M-parameter Llama. It is trained on the source of the CPython standard library of the training
machine (PSF licence, see README.md in this folder). It writes plausible Python: the demo's text is
readable, and its prompts have real structure.

First a tokenizer is trained (byte-level BPE, 1,024 entries), then the model, on one thread, for a
wall-clock budget. The learning rate follows the clock, so a slower machine runs fewer steps of a
complete schedule. With `--draft`, a tenth of the model's size is trained in OUT/draft on the same
data, with the tokenizer in OUT.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import sysconfig
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 1024
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONTEXT_TOKENS = 1024
BATCH = 4
PEAK_LEARNING_RATE = 4e-3
WARM_UP_STEPS = 40
LEFT_OUT = (
    "site-packages",
    "/test",
    "/idlelib",
    "lib2to3",
    "/encodings/",
    "pydoc_data",
    "ensurepip",
)

SHAPE = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=0,
    pad_token_id=0,
)
DRAFT_SHAPE = LlamaConfig(
    **{
        **SHAPE.to_diff_dict(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
)


def sources() -> list[str]:
    """Return the sources of the standard library, shuffled with a fixed seed."""
    root = sysconfig.get_path("stdlib")
    files = sorted(
        path for path in Path(root).rglob("*.py") if not any(x in str(path) for x in LEFT_OUT)
    )
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    random.Random(0).shuffle(texts)
    return texts


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which can encode any prompt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """Return the texts' tokens concatenated, each followed by `<|endoftext|>`."""
    return torch.tensor([t for text in texts for t in [*tokenizer.encode(text).ids, 0]])


def held_out_loss(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    """Return the mean cross-entropy, in nats per token, over at most 64 held-out windows."""
    windows = tokens[: len(tokens) // CONTEXT_TOKENS * CONTEXT_TOKENS].view(-1, CONTEXT_TOKENS)[:64]
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(
                model(window[None, :-1]).logits[0].float(), window[1:]
            ).item()
            for window in windows
        ]
    return sum(losses) / len(losses)


def train(tokens: torch.Tensor, shape: LlamaConfig, minutes: float) -> LlamaForCausalLM:
    """Train for a wall-clock budget with AdamW and a cosine schedule over that budget."""
    model = LlamaForCausalLM(shape)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    began = time.monotonic()
    step = 0
    while (spent := (time.monotonic() - began) / (60 * minutes)) < 1:
        warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
        rate = PEAK_LEARNING_RATE * warm_up * (0.05 + 0.475 * (1 + math.cos(math.pi * spent)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(tokens) - CONTEXT_TOKENS - 1, (BATCH,))
        batch = torch.stack([tokens[i : i + CONTEXT_TOKENS + 1] for i in starts])
        # The draft's products are too small for bfloat16: a step takes 6 times as long on a Xeon.
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=shape is SHAPE):
            logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().view(-1, VOCABULARY), batch[:, 1:].reshape(-1)
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            sys.stderr.write(f"step {step}  {spent:.0%}  loss {loss.item():.3f}\n")
    return model.eval()


def main() -> None:
    """Train the tokenizer and the model, or a draft, and write them as a Hugging Face folder."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--minutes", type=float, default=20.0)
    arguments.add_argument(
        "--draft", action="store_true", help="train the draft of the model in OUT"
    )
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    texts = sources()
    num_held_out = max(8, len(texts) // 25)
    if options.draft:
        folder, shape = options.out / "draft", DRAFT_SHAPE
        tokenizer = Tokenizer.from_file(str(options.out / "tokenizer.json"))
    else:
        folder, shape = options.out, SHAPE
        tokenizer = train_tokenizer(texts[num_held_out:])
    held_out = encode(tokenizer, texts[:num_held_out])
    model = train(encode(tokenizer, texts[num_held_out:]), shape, options.minutes)
    loss = held_out_loss(model, held_out)

    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    if not options.draft:
        tokenizer.save(str(folder / "tokenizer.json"))
    bytes_per_token = sum(len(t.encode()) for t in texts[:num_held_out]) / len(held_out)
    summary = {
        "python": sys.version.split()[0],
        "files": len(texts),
        "parameters": sum(p.numel() for p in model.parameters()),
        "minutes": options.minutes,
        "held_out_bits_per_byte": round(loss / math.log(2) / bytes_per_token, 3),
    }
    (folder / "training.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
