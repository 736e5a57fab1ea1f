"""Every block of Python in the README and in docs/ runs, in the order of its page and in one namespace.

What a reader is taken to have (a model, its input, a data loader) is made small here, and what a page loads by its name
on the hub is a tiny model of random weights.
"""

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    ViTConfig,
    ViTForImageClassification,
)

import fewkeys as fk
import tiny_models
from fewkeys.native.sets import SETS
from test_project import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
ELSEWHERE = {"README.md": 1, "docs/embedding.md": 2, "docs/sparsefinder.md": 1}
"""How many blocks other tests run, those of the real model and of the learned graph."""


def bert() -> BertModel:
    torch.manual_seed(0)
    small = {"num_attention_heads": 2, "num_hidden_layers": 1}
    return BertModel(BertConfig(**tiny_models.SIZES | small, max_position_embeddings=128)).eval()


def vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}
    return ViTForImageClassification(ViTConfig(**size, image_size=16, patch_size=4, num_labels=3)).eval()


def tokenizer(texts: list[str], **_: Any) -> dict[str, torch.Tensor]:
    """Twelve tokens of every text."""
    return {"input_ids": tiny_models.tokens(len(texts), 12), "attention_mask": torch.ones(len(texts), 12)}


def tensors() -> dict[str, Any]:
    """Queries, keys and values, and what a page says of them."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 600, 16).unbind()
    return {"torch": torch, "fk": fk, "query": query, "key": key, "value": value, "generator": torch.Generator()}


def encoder() -> dict[str, Any]:
    model = bert()
    batches = [tiny_models.tokens(1, 70, seed) for seed in range(4)]
    return {"model": model, "batches": batches, "batch": {"input_ids": batches[0]}, "inputs": {"input_ids": batches[0]}}


def readme(folder: Path) -> dict[str, Any]:
    fk.ModelPlan(((fk.budget(16),) * 2,)).save_pretrained(folder / "DIR")
    return {**tensors(), **encoder()}


def images() -> dict[str, Any]:
    model = vit()
    pixels = torch.randn(70, 3, 16, 16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    loader = [(pixels[:3], torch.tensor([0, 1, 2])), (pixels[3:6], torch.tensor([0, 1, 2]))]
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return {"pixels": pixels, "loader": loader, "optimizer": optimizer, "scheduler": scheduler, "epochs": 1}


def decoder() -> dict[str, Any]:
    inputs = {"input_ids": tiny_models.tokens(1, 20), "max_new_tokens": 2, "do_sample": False}
    return {"model": tiny_models.llama(), "inputs": inputs}


READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "README.md": readme,
    "docs/causal.md": lambda _: decoder(),
    "docs/concepts.md": lambda _: tensors(),
    "docs/levattention.md": lambda _: {**tensors(), "stream": list(torch.randn(3, 1, 4, 50, 16))},
    "docs/measuring.md": lambda _: measured(),
    "docs/method.md": lambda _: tensors(),
    "docs/quality-control.md": lambda _: encoder(),
    "docs/transformers.md": lambda _: {**dict(zip("qkv", torch.randn(3, 2, 2, 70, 8), strict=True)), "lengths": None},
    "docs/tuning.md": lambda _: {**tensors(), **encoder()},
    "docs/vision.md": lambda _: images(),
}
"""What the reader of a page has before its first block."""


def measured() -> dict[str, Any]:
    has = tensors()
    query, key, value = has["query"], has["key"], has["value"]
    kept = fk.Window(9).graph(query, key).to_mask()
    weights = (query @ key.mT / 4).softmax(-1)
    approx = fk.attention(query, key, value, keep=fk.Window(9))
    truth = {"exact": weights @ value, "weights": weights, "gold": weights > 0.01}
    return {**has, **truth, "approx": approx, "mask": kept, "predicted": kept}


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Nothing in the documented uses leaves the machine."""
    connect = socket.socket.connect

    def local(self: socket.socket, address: Any) -> None:
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1"), f"a connection to {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local)


PAGES = {
    path.relative_to(ROOT).as_posix(): blocks
    for path in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    if (blocks := BLOCK.findall(path.read_text(encoding="utf-8")))
}


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, value)  # as torchrun does, for the page on shards
    for auto, made in ((AutoModel, bert), (AutoModelForImageClassification, vit), (AutoTokenizer, lambda: tokenizer)):
        monkeypatch.setattr(auto, "from_pretrained", lambda name, made=made: made())
    has = READERS.get(page, lambda _: {})(tmp_path) | {"__name__": page}
    for number, block in enumerate(PAGES[page][ELSEWHERE.get(page, 0) :]):
        if "generate(" in block:
            has |= decoder()
        exec(compile(block, f"{page}, block {number}", "exec"), has)


@pytest.mark.long
@pytest.mark.parametrize("notebook", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run_and_hold_no_output(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    has = {"__name__": notebook.stem}
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "clear the outputs before committing"
            exec(compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec"), has)


def test_quoted_messages_are_those_of_the_code():
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    quoted = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "faq.md").read_text(encoding="utf-8"), re.M)
    parts = [part.strip() for text in quoted for part in text.rpartition(": ")[2].split("...")]
    assert len(quoted) > 3
    assert [part for part in parts if part not in source] == []
    (named,) = re.findall(r"compiling the kernels for (\w+) with", (ROOT / "docs" / "install.md").read_text())
    assert named in map(str, SETS)


def test_every_page_with_a_reader_is_read():
    assert set(READERS) <= set(PAGES)
