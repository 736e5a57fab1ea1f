"""Embed documents over a cluster with Ray Data: every worker loads the model and its plan once.

    pip install "fewkeys[hf]" sentence-transformers "ray[data]"
    python -c 'import fewkeys as fk; fk.budget(192).save_pretrained("PLAN")'
    python embed_ray.py --model ID_OR_DIR --plan PLAN --documents documents.jsonl --out DIR --workers 2

documents.jsonl has one JSON object a line, with "text" and whatever else tells documents apart; DIR gets Parquet files
of the same rows with "embedding" and "worker", the process that embedded them, beside. Without a cluster
(`RAY_ADDRESS`), one is made of this machine; with one, model, plan, documents and DIR must be where all of it can read.
"""

import argparse
import os
from typing import Any

import ray
import torch
from ray.data import ActorPoolStrategy
from sentence_transformers import SentenceTransformer

import fewkeys as fk


class Embedder:
    """A worker: made once, then called with batch after batch."""

    def __init__(self, model: str, plan: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.encoder = SentenceTransformer(model, device="cpu")
        fk.apply(self.encoder, fk.Plan.from_pretrained(plan))

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows = self.encoder.encode(list(batch["text"]), batch_size=1)
        return batch | {"embedding": rows, "worker": [os.getpid()] * len(rows)}


def embed(options: argparse.Namespace, worker: type) -> None:
    # Beside the workers, reading and writing take a core; without one they would wait for ever.
    ray.init(num_cpus=None if "RAY_ADDRESS" in os.environ else options.workers * options.threads + 1)
    documents = ray.data.read_json(options.documents).repartition(target_num_rows_per_block=options.batch)
    documents = documents.map_batches(
        worker,
        fn_constructor_kwargs={"model": options.model, "plan": options.plan, "threads": options.threads},
        compute=ActorPoolStrategy(size=options.workers),
        num_cpus=options.threads,
        batch_size=options.batch,
    ).materialize()
    print(f"{documents.count()} documents by {len(documents.unique('worker'))} workers")
    documents.write_parquet(options.out)


def main(worker: type = Embedder) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("model", "plan", "documents", "out"):
        parser.add_argument(f"--{name}", required=True, type=os.path.abspath)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--batch", type=int, default=4, help="documents that a worker takes at a time")
    embed(parser.parse_args(), worker)


if __name__ == "__main__":
    main()
