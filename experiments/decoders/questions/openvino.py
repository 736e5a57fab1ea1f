"""OpenVINO GenAI's own eviction of keys and XAttention on the needles of `tasks.py`.

    python -m experiments.decoders.questions.openvino --model FOLDER --gguf FILE --text FILE

OpenVINO GenAI returns text, no logits, and evicts keys while it writes an answer, after a prefill of context and
question. So every question is a separate prompt that begins with the earlier turns; its prefix cache keeps their keys.
The answer is generated greedily and is right if it contains the number. Shares are relative to the right answers of
OpenVINO's exact attention. All in float32, as the other rows. Each figure is written to results/questions-openvino.json
at once, so that a stopped run goes on.

Needs: pip install openvino-genai==2026.4.1.0 (which brings openvino and openvino-tokenizers), or the same with
--target FOLDER.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
from experiments.cells import Cell, measure, opened
from experiments.decoders.decoder import load_tokenizer, options as decoder_options, read_text
from experiments.decoders.questions.run import RESULTS
from experiments.decoders.tasks import TASKS, Maker, Prompt

FILE = "questions-openvino.json"
NEEDLES = ("few needles", "many needles")
NEW_TOKENS = 16
PRECISE = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
START, RECENT = 32, 64
"""Tokens that eviction always keeps, in whole blocks of 32: at least one block at the beginning."""


def _evicting(genai: Any, slots: int) -> dict[str, Any]:
    mode = genai.AggregationMode.NORM_SUM
    config = genai.CacheEvictionConfig(START, min(RECENT, slots // 2 - START), slots, mode)
    return {"use_cache_eviction": True, "cache_eviction_config": config}


def _sparse(genai: Any) -> dict[str, Any]:
    config = genai.SparseAttentionConfig(genai.SparseAttentionMode.XATTENTION)
    return {"use_sparse_attention": True, "sparse_attention_config": config}


ROWS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "exact": lambda genai: {},
    "eviction, 256 slots": lambda genai: _evicting(genai, 256),
    "eviction, 128 slots": lambda genai: _evicting(genai, 128),
    "XAttention": _sparse,
}
"""Settings of the scheduler that differ from its defaults. XAttention has all its defaults."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = decoder_options(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="plain or .gz")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder for {FILE}")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt, questions included")
    parser.add_argument("--tasks", nargs="+", choices=NEEDLES, default=NEEDLES[:1], metavar="TASK")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the prompts, 8 questions each")
    options = parser.parse_args(arguments)
    genai = import_module("openvino_genai")
    results = opened(options.out, FILE, model=options.gguf)
    measure(_cells(genai, options), results, options.out, FILE, **{"openvino-genai": genai.get_version()})
    return 0


def _cells(genai: Any, options: argparse.Namespace) -> Iterator[Cell]:
    tokenizer = load_tokenizer(options.model, options.gguf)
    maker = Maker(tokenizer, read_text(options.text))
    for row in options.rows:
        pipeline = cache(partial(_pipeline, genai, Path(options.model) / options.gguf, ROWS[row](genai)))
        for seed, task in product(options.seeds, options.tasks):

            def judge(pipeline: Any = pipeline, task: str = task, seed: int = seed) -> dict[str, int]:
                asked = list(questions(TASKS[task](maker, options.length, seed), tokenizer))
                right = sum(number in _written(genai, pipeline(), ids, tokenizer) for ids, number in asked)
                return {"right": right, "answers": len(asked)}

            yield {"task": task, "length": options.length, "seed": seed, "row": row}, judge


def questions(prompt: Prompt, tokenizer: Any) -> Iterator[tuple[list[int], str]]:
    """For each question all tokens before its answer, and the number that answers it."""
    ids = prompt.tokens[0].tolist()
    turns: dict[int, list[int]] = {}
    for one in prompt.judged:
        turns.setdefault(one.answer, []).append(one.place)
    blank = [{"role": "user", "content": ""}]
    opening = tokenizer.apply_chat_template(blank, tokenize=False, add_generation_prompt=True)
    last = tokenizer(opening, add_special_tokens=False)["input_ids"][-1]
    for places in turns.values():
        # An answer is one line, so its words begin after the last token of the kind that opens it.
        begin = max(place for place in range(prompt.context, places[0]) if ids[place] == last) + 1
        yield ids[:begin], tokenizer.decode(ids[places[0] : places[-1] + 1]).strip()


def _pipeline(genai: Any, path: Path, differs: dict[str, Any]) -> Any:
    scheduler = genai.SchedulerConfig()
    settings = {"cache_size": 1, "max_num_batched_tokens": 16384, "enable_prefix_caching": True, **differs}
    for name, value in settings.items():
        setattr(scheduler, name, value)
    threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    return genai.ContinuousBatchingPipeline(str(path), scheduler, "CPU", PRECISE | threads)


def _written(genai: Any, pipeline: Any, ids: list[int], tokenizer: Any) -> str:
    config = genai.GenerationConfig()
    config.max_new_tokens = NEW_TOKENS
    tokens = import_module("openvino").Tensor(torch.tensor([ids]).numpy())
    text: str = tokenizer.decode(pipeline.generate([tokens], [config])[0].m_generation_ids[0])
    return text


if __name__ == "__main__":
    sys.exit(main())
