"""A folder of texts to vectors: `python -m benchmarks.embed [--model modernbert] [--texts 100] [--most 8000]`.

Writes benchmarks/results/embed.json; `python -m docs.figures` then writes the table of docs/embedding.md. With
`--texts 10 --most 4000` it takes a tenth of the time.

`fewkeys embed` against `SentenceTransformer.encode` with exact attention, in batches of 32, which is its default, and
text by text; and late chunks of 256 tokens under the plan against those of exact attention. Each runs in a separate
process. Measured are seconds from its start to its end, processor seconds of all threads, and peak resident memory,
also above that of a process that embeds one short text. Cosines are of each vector with the exact one.

minilm: all-MiniLM-L6-v2 (`fewkeys[demo]`), its positions stretched over 8,192 tokens, so that attention is that of a
trained model. modernbert: random weights in ModernBERT-base's shape with 6 layers, for time and memory.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import write_whole
from fewkeys.demo import TEXT, model_folder
from fewkeys.integrations.interface import unwrapped

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "embed.json"
REST = Path(__file__).parent / "opticks.txt"
"""The text that goes on where the demo's ends."""
LEAST, POSITIONS, CHUNK = 500, 8192, 256
EXACT = """
import sys
from pathlib import Path
import numpy as np
from fewkeys.integrations.loading import load_encoder
encoder = load_encoder(sys.argv[1])
texts = [path.read_text() for path in sorted(Path(sys.argv[2]).iterdir())]
np.savez(sys.argv[3], vectors=encoder.encode(texts, batch_size=int(sys.argv[4])))
"""


def stretched(tokens: int) -> Any:
    """all-MiniLM-L6-v2 as a SentenceTransformer, its 512 positions stretched to `tokens` by linear interpolation.

    It was never trained on such lengths. Its times are right, its vectors are good for comparisons with its own only.
    """
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(model_folder()), device="cpu")
    model = unwrapped(encoder)
    table = model.embeddings.position_embeddings
    longer = interpolate(table.weight.data.T[None], size=tokens, mode="linear", align_corners=True)[0].T
    model.embeddings.position_embeddings = torch.nn.Embedding.from_pretrained(longer.contiguous())
    model.embeddings.register_buffer("position_ids", torch.arange(tokens)[None], persistent=False)
    model.embeddings.register_buffer("token_type_ids", torch.zeros(1, tokens, dtype=torch.long), persistent=False)
    model.config.max_position_embeddings = encoder.max_seq_length = tokens
    return encoder


def save_model(name: str, folder: Path) -> None:
    """Save a SentenceTransformer with `POSITIONS` positions."""
    if name == "minilm":
        stretched(POSITIONS).save(str(folder))
        return
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from transformers import AutoTokenizer, ModernBertConfig, ModernBertModel

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_folder(), model_max_length=POSITIONS)
    ids = dict.fromkeys(("bos_token_id", "cls_token_id"), tokenizer.cls_token_id)
    ids |= dict.fromkeys(("eos_token_id", "sep_token_id"), tokenizer.sep_token_id) | {"pad_token_id": 0}
    ModernBertModel(ModernBertConfig(num_hidden_layers=6, vocab_size=len(tokenizer), **ids)).save_pretrained(
        folder / "0"
    )
    tokenizer.save_pretrained(folder / "0")
    first = Transformer(str(folder / "0"))
    SentenceTransformer(modules=[first, Pooling(768), Normalize()], device="cpu").save(str(folder))


def save_texts(folder: Path, text: str, count: int, most: int) -> list[int]:
    """Stretches of the text from random places, of `LEAST` to `most` tokens; their tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    text = text * 2
    starts = [start for start, _ in tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"][1:-1]]
    draw = torch.Generator().manual_seed(0)
    sizes = torch.linspace(LEAST, min(most, len(starts) // 2), count).long().tolist()
    folder.mkdir()
    for number, size in enumerate(sizes):
        first = int(torch.randint(len(starts) - size, (1,), generator=draw))
        (folder / f"{number:04}.txt").write_text(text[starts[first] : starts[first + size]], encoding="utf-8")
    return sizes


def run(*command: object) -> dict[str, float]:
    """Seconds, those of the processor, and the peak of resident memory, in MB, of a process."""
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    with tempfile.TemporaryDirectory() as compiled:  # a model is compiled anew
        env = {**os.environ, **paths, "TORCHINDUCTOR_CACHE_DIR": compiled}
        start = perf_counter()
        process = subprocess.Popen([sys.executable, *map(str, command)], env=env, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        seconds = perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with {process.returncode}")
    busy = round(used.ru_utime + used.ru_stime, 1)
    return {"seconds": round(seconds, 1), "cpu_seconds": busy, "peak_mb": round(used.ru_maxrss / 1024)}


def cosines(one: Path, other: Path) -> dict[str, float]:
    """Mean and least cosine of the rows of two files."""
    first, second = (torch.from_numpy(np.load(path)["vectors"]) for path in (one, other))
    similarity = torch.cosine_similarity(first, second)
    return {"vectors": len(similarity), "mean": float(similarity.mean()), "least": float(similarity.min())}


def _plan(vectors: Path) -> str:
    """The plan of a file of vectors."""
    return str(fk.Plan.from_dict(json.loads(str(np.load(vectors)["settings"]))["plan"]))


def measured(folder: Path, model: str, text: str, count: int, most: int, slots: int | None) -> dict[str, Any]:
    model_folder, texts, one = folder / "model", folder / "texts", folder / "one"
    plan = () if slots is None else ("--slots", slots)
    save_model(model, model_folder)
    tokens = save_texts(texts, text, count, most)
    one.mkdir()
    (one / "short.txt").write_text("A query seldom needs every key.")
    fk.Plan().save_pretrained(folder / "exact")
    embed = ("-m", "fewkeys", "embed", "--model", model_folder)
    chunks = (*embed, "--chunk", CHUNK, texts)
    run(*embed, "--out", folder / "warm.npz", *plan, texts / f"{count - 1:04}.txt")  # kernels, measurements
    run(*embed, "--out", folder / "warm.npz", "--chunk", CHUNK, *plan, texts / f"{count - 1:04}.txt")
    rows = {"one short text": run("-c", EXACT, model_folder, one, folder / "one.npz", 1)}
    rows["exact, text by text"] = run("-c", EXACT, model_folder, texts, folder / "exact.npz", 1)
    rows["exact, batches of 32"] = run("-c", EXACT, model_folder, texts, folder / "batches.npz", 32)
    rows["fewkeys embed"] = run(*embed, "--out", folder / "few.npz", *plan, texts)
    rows["fewkeys embed --compile"] = run(*embed, "--compile", "--out", folder / "compiled.npz", *plan, texts)
    rows["exact late chunks"] = run(*chunks, "--out", folder / "exact chunks.npz", "--plan", folder / "exact")
    rows["fewkeys embed, late chunks"] = run(*chunks, "--out", folder / "chunks.npz", *plan)
    for row in rows.values():
        row["above_mb"] = row["peak_mb"] - rows["one short text"]["peak_mb"]
    return {
        "plan": _plan(folder / "few.npz"),
        "plan_chunks": _plan(folder / "chunks.npz"),
        "texts": count,
        "tokens": {"least": min(tokens), "most": max(tokens), "sum": sum(tokens)},
        "rows": rows,
        "cosine": cosines(folder / "few.npz", folder / "exact.npz"),
        "cosine_compiled": cosines(folder / "compiled.npz", folder / "exact.npz"),
        "cosine_chunks": cosines(folder / "chunks.npz", folder / "exact chunks.npz"),
        "error": float(np.load(folder / "few.npz")["error"].mean()),
        "machine": machine(),
        "versions": versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("minilm", "modernbert"), default="minilm")
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--most", type=int, default=8000, help="tokens of the longest text")
    parser.add_argument("--slots", type=int, help="default: that of fewkeys embed")
    parser.add_argument("--text", type=Path, nargs="+", default=[TEXT, REST], help="where the texts are taken from")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    text = "\n".join(path.read_text(encoding="utf-8") for path in options.text)
    with tempfile.TemporaryDirectory() as folder:
        measurements = measured(Path(folder), options.model, text, options.texts, options.most, options.slots)
    result = json.loads(options.out.read_text()) if options.out.is_file() else {}
    print(json.dumps(measurements, indent=1))
    write_whole(options.out, json.dumps(result | {options.model: measurements}, indent=1) + "\n")


if __name__ == "__main__":
    main()
