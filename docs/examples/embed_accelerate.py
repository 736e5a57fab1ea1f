"""Embed documents in several processes with accelerate: every process loads the model and its plan once.

    pip install "fewkeys[hf]" sentence-transformers accelerate
    python -c 'import fewkeys as fk; fk.budget(192).save_pretrained("PLAN")'
    torchrun --nproc-per-node 2 embed_accelerate.py \\
        --model ID_OR_DIR --plan PLAN --documents documents.jsonl --out embeddings.safetensors

documents.jsonl has one JSON object a line, with "text"; row i of "embedding" is that of line i. Several machines:
`torchrun --nnodes`, and a folder that all can read. (`accelerate launch` starts several processes on GPUs, on CPUs only
by MPI.)
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer

import fewkeys as fk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("model", "plan", "documents", "out"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    state = PartialState(cpu=not torch.cuda.is_available())
    encoder = SentenceTransformer(options.model, device=str(state.device))
    fk.apply(encoder, fk.Plan.from_pretrained(options.plan))
    texts = [json.loads(line)["text"] for line in Path(options.documents).read_text(encoding="utf-8").splitlines()]
    with state.split_between_processes(texts) as share:
        rows = encoder.encode(share, batch_size=1, convert_to_tensor=True).cpu()
    print(f"process {state.process_index} of {state.num_processes}: {len(rows)} documents")
    rows = torch.stack(gather_object([*rows]))
    if state.is_main_process:
        save_file({"embedding": rows}, options.out)
    state.destroy_process_group()


if __name__ == "__main__":
    main()
