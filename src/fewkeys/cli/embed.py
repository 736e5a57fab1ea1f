"""Embed texts with a sentence-transformers model: one vector for each text or, with --chunk, for each part of a text. A
plan makes attention faster on long texts; on short texts exact attention runs. Pooling, prompts and normalisation are
those of the model's folder. The output file has a row for each vector: path, start and stop (characters), tokens, error
(relative error of the attention output, estimated from a few exact queries; 0 where exact attention ran), and the
vector. Run the same command again to continue after an interruption.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from fewkeys.cli import inputs
from fewkeys.cli.documents import read_documents
from fewkeys.cli.files import check_folder, deliver, printable
from fewkeys.cli.options import add_common, named_path, whole
from fewkeys.cli.progress import Step, progress
from fewkeys.core.version import VERSION

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from fewkeys.cli.vectors import TextRows
    from fewkeys.model_plan import ModelPlan
    from fewkeys.plan import Plan

SLOTS = 192
"""Slots of the default plan. At thousands of tokens it takes about as long as 64 slots, which have more cohorts."""
CHUNK_SLOTS, CHUNK_COHORTS = 256, 64
"""The default plan for late chunks, whose vectors average fewer tokens. On MiniLM it takes a quarter more time than
`budget(192)`, and its cosines are a third as far from 1 (on WikiText and two other texts).
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    texts = "text files in UTF-8, or folders of them; other files in a folder are left out and named"
    parser.add_argument("texts", nargs="+", type=named_path, metavar="FILE_OR_FOLDER", help=texts)
    parser.add_argument("--model", required=True, metavar="ID_OR_DIR", help="sentence-transformers folder or hub id")
    out = "file to write: .npz, or .parquet with pyarrow"
    parser.add_argument("--out", required=True, type=named_path, metavar="FILE", help=out)
    chunk = "late chunks: one pass over a text, a vector for each N tokens (default: one vector for the text)"
    parser.add_argument("--chunk", type=whole(), metavar="N", help=chunk)
    longer = (
        "texts longer than one pass: stop before any work (refuse, the default), leave them out (skip), or "
        "embed parts of about equal length, each in a separate row (split)"
    )
    parser.add_argument("--longer", choices=("refuse", "skip", "split"), default="refuse", help=longer)
    most = "most tokens of one pass, at most the model's positions (default: max_seq_length of the model's folder)"
    parser.add_argument("--max-tokens", type=whole(), metavar="N", help=most)
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt-name", metavar="NAME", help="prompt of the model's folder to put before every text")
    prompts.add_argument("--prompt", metavar="TEXT", help="text to put before every text")
    plans = parser.add_mutually_exclusive_group()
    slots = (
        f"run fewkeys.budget(N), with {CHUNK_COHORTS} cohorts for late chunks (default: the plan in the model's "
        f"folder, or else {SLOTS} slots, {CHUNK_SLOTS} for late chunks)"
    )
    plans.add_argument("--slots", type=whole(), metavar="N", help=slots)
    plans.add_argument("--plan", type=named_path, metavar="DIR", help="folder with a plan, such as fewkeys tune writes")
    compiled = "compile the model first, once for texts of any length; for large folders, above all on AMD processors"
    parser.add_argument("--compile", action="store_true", help=compiled)
    add_common(parser, None, seed=False)
    parser.set_defaults(kept="finished texts")


def run(arguments: argparse.Namespace) -> None:
    out: Path = arguments.out
    _check_out(out)
    inputs.need("transformers", "sentence_transformers")
    documents, skipped = read_documents(arguments.texts)

    from fewkeys.cli.vectors import FinishedPasses, columns, key_of, save
    from fewkeys.integrations import embed

    work, start = out.parent / f".{out.name}.embedding", monotonic()
    with progress() as step:
        encoder, plan, settings = _opened(arguments, step)
        named = set(map(printable, arguments.texts))
        passes, left_out = _passes(documents, named, encoder, settings, step)
        texts = {key_of(text): text for parts in passes.values() for _, text in parts}
        finished = FinishedPasses(work, settings)
        left = {key: text for key, text in texts.items() if key not in finished.rows}
        of_plan = "--model" if arguments.plan is None else "--plan"
        try:
            with inputs.named_as_options(compile="--compile", plan=of_plan, chunks="--chunk", is_causal=of_plan):
                if arguments.compile:
                    embed.compile_model(encoder)
                for key, rows in _embedded(encoder, plan, left, settings, step):
                    finished.add(key, rows)
        finally:
            finished.write()
    table = columns(passes, finished.rows)
    save(work / out.name, table, settings)
    (work / out.name).replace(out)
    shutil.rmtree(work, ignore_errors=True)

    facts = settings | {"seconds": monotonic() - start, "resumed": len(texts) - len(left)}
    facts |= {"out": str(out), "texts": len(passes), "vectors": list(table["vectors"].shape)}
    facts |= {"tokens": int(table["tokens"].sum()), "error": float(table["error"].mean())}
    facts["skipped"] = skipped | left_out
    deliver(arguments, facts, lambda: _show(facts, table))


def _check_out(out: Path) -> None:
    if out.suffix not in (".npz", ".parquet") or out.is_dir():
        raise ValueError(f"--out: expected a file that ends in .npz or .parquet, got {out}")
    if out.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise ValueError("--out: .parquet needs pyarrow, which is not installed; pip install pyarrow, or use .npz")
    check_folder(out.parent)


def _opened(arguments: argparse.Namespace, step: Step) -> tuple[SentenceTransformer, Plan | ModelPlan, dict[str, Any]]:
    """The encoder, its plan, and the settings that the vectors depend on."""
    step(0, 0, "loading the model")
    from fewkeys.integrations import embed
    from fewkeys.integrations.loading import load_encoder

    with inputs.named_as_options(
        name_or_dir="--model", prompt="--prompt", prompt_name="--prompt-name", chunks="--chunk"
    ):
        encoder = load_encoder(arguments.model)
        if arguments.max_tokens is not None:
            encoder.max_seq_length = arguments.max_tokens
        most = embed.longest(encoder)
        if most is not None and most < (arguments.max_tokens or 0):
            raise ValueError(f"--max-tokens: expected at most the model's {most} positions, got {arguments.max_tokens}")
        prompt = embed.resolved_prompt(encoder, arguments.prompt_name, arguments.prompt)
        embed.check_chunks(encoder, arguments.chunk)
    plan = _plan(arguments, encoder)
    settings = {
        "fewkeys": VERSION,
        "model": arguments.model,
        "encoder": embed.digest(encoder),
        "plan": plan.to_dict(),
        "prompt": prompt,
        "chunk": arguments.chunk,
        "longer": arguments.longer,
        "max_tokens": most,
    }
    return encoder, plan, settings


def _plan(arguments: argparse.Namespace, encoder: SentenceTransformer) -> Plan | ModelPlan:
    """The plan that --plan names, else the one in the model's folder, else the default budget."""
    from fewkeys.integrations.interface import attention_modules, is_causal
    from fewkeys.plan import FILE, MODEL_FILE, budget

    folder = arguments.plan or Path(arguments.model)
    has_plan = any((folder / name).is_file() for name in (FILE, MODEL_FILE))
    if arguments.plan is not None or (has_plan and arguments.slots is None):
        return inputs.open_plan(folder, "--model" if arguments.plan is None else "--plan")
    causal = any(map(is_causal, attention_modules(encoder)))
    if arguments.chunk is None or causal:
        return budget(arguments.slots or SLOTS, is_causal=causal)
    return budget(arguments.slots or CHUNK_SLOTS, cohorts=CHUNK_COHORTS)


def _passes(
    documents: dict[str, str], named: set[str], encoder: SentenceTransformer, settings: dict[str, Any], step: Step
) -> tuple[dict[str, list[tuple[int, str]]], dict[str, str]]:
    """The parts of each text that the model reads in one pass, with their first characters; and the files that are left
    out, with reasons. `ValueError` if a text is refused, or none is left. named: the texts that are arguments.
    """
    from fewkeys.integrations import embed

    most, longer, prompt = (settings[name] for name in ("max_tokens", "longer", "prompt"))
    passes: dict[str, list[tuple[int, str]]] = {}
    left_out: dict[str, str] = {}
    too_long: dict[str, int] = {}
    for done, (name, text) in enumerate(documents.items()):
        step(done, len(documents), f"counting the tokens of {_counted(len(documents), 'text')}")
        with inputs.named_as_options(**{"text": name, "encoder.max_seq_length": "--max-tokens"}):
            try:
                tokens = len(embed.read_tokens(encoder, prompt, text).ids)
            except embed.NoTokenError:
                if name in named:
                    raise
                left_out[name] = "makes no token"
                continue
            spans = [(0, len(text))]
            if most is not None and tokens > most:
                if longer != "split":
                    too_long[name] = tokens
                    continue
                spans = embed.split(encoder, text, prompt=prompt)
        passes[name] = [(first, text[first:last]) for first, last in spans]
    if too_long and longer == "refuse":
        name = max(too_long, key=too_long.__getitem__)
        raise ValueError(
            f"{name}: expected at most {most} tokens, which is one pass of this model, got {too_long[name]:,}, the "
            f"longest of {_counted(len(too_long), 'such text')}; use --longer split or --longer skip, or raise "
            "--max-tokens where the model has more positions"
        )
    left_out |= {name: f"has {tokens:,} tokens, more than one pass of {most}" for name, tokens in too_long.items()}
    if not passes:
        name, reason = next(iter(left_out.items()))
        raise ValueError(f"FILE_OR_FOLDER: expected at least one text to embed, got none: {name} {reason}")
    return passes, left_out


def _embedded(
    encoder: SentenceTransformer, plan: Plan | ModelPlan, texts: dict[str, str], settings: dict[str, Any], step: Step
) -> Iterator[tuple[str, TextRows]]:
    """The rows of every text, by its key: a pass over each."""
    import torch

    from fewkeys.cli.vectors import TextRows
    from fewkeys.integrations import embed
    from fewkeys.integrations.transformers import apply

    total, done = sum(map(len, texts.values())), 0
    with apply(encoder, plan, max_error=embed.WATCH) as applied:
        for key, text in texts.items():
            step(done, total, f"embedding {_counted(len(texts), 'text')}, {10 * (10 * done // total)} % done")
            before = applied.fallbacks
            chunks = embed.late_chunks(encoder, text, settings["chunk"], prompt=settings["prompt"])
            tokens, spans = torch.tensor(chunks.tokens), torch.tensor(chunks.spans)
            error = torch.full_like(tokens, embed.estimated(before, applied.fallbacks), dtype=torch.float64)
            yield key, TextRows(chunks.vectors.float().cpu(), spans, tokens, error)
            done += len(text)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _show(facts: dict[str, Any], table: dict[str, Any]) -> None:
    if skipped := facts["skipped"]:
        lines = [f"{name} {reason}" for name, reason in skipped.items()]
        print("\n  ".join([f"fewkeys: note: {_counted(len(lines), 'file')} left out:", *lines]), file=sys.stderr)
    vectors, width = facts["vectors"]
    again = f", {facts['resumed']} of them from the run before" if facts["resumed"] else ""
    print(
        f"{_counted(vectors, 'vector')} of {width} dimensions from {_counted(facts['texts'], 'text')} "
        f"({facts['tokens']:,} tokens){again}, in {facts['seconds']:,.1f} s: {facts['out']}"
    )
    if worst := table["error"].max():
        name = table["path"][table["error"].argmax()]
        print(f"Estimated error of attention's output: {facts['error']:.3f} on average, at most {worst:.3f} ({name}).")
    else:
        print("Exact attention answered every text: it is faster at these lengths.")
