"""The translation model: a Marian configuration from nothing, trained with dense 1.5-entmax, judged by BLEU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from experiments.sparsefinder.dense import dense_entmax
from experiments.sparsefinder.mt_data import END, LONGEST, PAD, Batch, Pairs, encode, padded
from torch.nn.functional import cross_entropy

Say = Callable[[str], None]


def new_model(vocabulary: int, layers: int, dropout: float = 0.2) -> Any:
    """4 heads of 32 dimensions, `layers` of encoder and as many of decoder."""
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=vocabulary,
        d_model=128,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        dropout=dropout,
        attention_dropout=0.0,
        activation_dropout=0.0,
        activation_function="relu",
        max_position_embeddings=2 * LONGEST,
        scale_embedding=True,
        init_std=0.05,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=PAD,
        forced_eos_token_id=None,
        bos_token_id=None,
    )
    return MarianMTModel(config)


def train(model: Any, stream: Iterator[Batch], steps: int, rate: float, say: Say) -> None:
    """AdamW, warm-up and decay as 1 / sqrt(step), labels smoothed by 0.1."""
    optimiser = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=1e-4)
    warm = max(1, steps // 8)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser,
        lambda s: min((s + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * max(0, s - warm) / max(1, steps - warm))),
    )
    start, recent = perf_counter(), 0.0
    model.train()
    with dense_entmax(model):
        for step in range(steps):
            batch = next(stream)
            real = batch.target.ne(PAD)
            hidden = model.model(**batch.inputs).last_hidden_state[real]
            logits = model.lm_head(hidden) + model.final_logits_bias
            loss = cross_entropy(logits, batch.target[real], label_smoothing=0.1)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad(set_to_none=True)
            recent += float(loss.detach()) / 50
            if step % 50 == 49:
                say(f"step {step + 1}/{steps}, loss {recent:.3f}, {perf_counter() - start:.0f} s")
                recent = 0.0
    model.eval()


@torch.no_grad()
def translate(model: Any, tokenizer: Any, sentences: Sequence[str], size: int = 125) -> list[str]:
    """Greedy translations, in order. The attention is whatever the model has at the moment."""
    rows = encode(tokenizer, sentences)
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i]), i))
    found = [""] * len(rows)
    for start in range(0, len(rows), size):
        own = order[start : start + size]
        ids = padded([rows[i] for i in own])
        longest = min(LONGEST, 10 + 2 * ids.shape[1])
        out = model.generate(
            input_ids=ids, attention_mask=ids.ne(PAD).long(), num_beams=1, do_sample=False, max_new_tokens=longest
        )
        for i, text in zip(own, tokenizer.batch_decode(out, skip_special_tokens=True), strict=True):
            found[i] = text
    return found


def bleu(found: Sequence[str], pairs: Pairs) -> float:
    """Corpus BLEU of sacreBLEU, its standard tokenisation, case kept."""
    import sacrebleu

    return float(sacrebleu.corpus_bleu(list(found), [list(pairs.target)]).score)
