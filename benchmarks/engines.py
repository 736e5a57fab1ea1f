"""Whole encoders by the engines that people use on CPUs, and under a plan: `python benchmarks/engines.py`.

Needs `pip install "fewkeys[engines]"`. Ways to run the same random weights, all in float32 on the same threads:

    torch           transformers' own model with `scaled_dot_product_attention`
    torch.compile   the same, compiled with `dynamic=True` and frozen weights, which takes the faster layers of oneDNN
    onnxruntime     exported by `torch.onnx.export`, ONNX Runtime's CPU provider
    openvino        converted by OpenVINO, `INFERENCE_PRECISION_HINT` f32
    fewkeys         the same model as `torch` under `fk.apply(model, fk.budget(64))`
    fewkeys.compile the same, compiled
    free            `torch` or `torch.compile`, the faster one, with `query + key + value` in the place of attention

`free` does not compute the model. It takes the time of everything but attention, so no method of attention gains more
on the best engine than `ceiling`, the ratio of their times.

Ways take turns. In a turn each runs twice, and the second call counts, as in a process that uses one of them: after
another engine, the system has memory to clear. A row has the median of each. A way is left out of a row where all
scores of a layer would not fit (`SCORES`), or where the shorter row says that a call would take longer than `LONGEST`
seconds, with the reason. Lengths at which torch itself would take that long are not run. OpenVINO's XAttention runs in
its text generation pipeline alone, which has no encoders.

Each row is added to benchmarks/results/engines.json, in the place of an older one, and engines.png drawn anew.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from shapes import random_model
from torch import Tensor
from transformers import AttentionInterface

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import write_whole
from fewkeys.report.style import Look, draw, logarithmic, name_lines, save, say, sheet

RESULTS = Path(__file__).parent / "results"
SHAPES = ((1, 512), (8, 512), (32, 128), (1, 1024), (1, 2048), (1, 4096), (1, 8192), (1, 16384))
MODELS = ("minilm", "base", "modernbert")
SLOTS, FEWEST_TURNS, TURNS, ENOUGH_SECONDS, LONGEST = 64, 5, 7, 20.0, 40.0
SCORES = 2**31
"""Bytes of one layer's scores, beyond which ONNX Runtime, which holds them all, is left out."""
PAUSE = 0.05
"""Seconds between two ways, so that one engine's waiting threads do not slow the next."""
KINDS, HEADS = 1000, 12


class Encoder(torch.nn.Module):
    """Token numbers in, the last layer's states out: what every engine can take."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids).last_hidden_state


def _by_onnxruntime(encoder: Encoder, ids: Tensor) -> Callable[[], Tensor]:
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.onnx"
        torch.onnx.export(encoder, (ids,), path, input_names=["input_ids"], dynamo=True, verbose=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {"input_ids": ids.numpy()}
    return lambda: torch.from_numpy(session.run(None, feed)[0])


def _by_openvino(encoder: Encoder, ids: Tensor) -> Callable[[], Tensor]:
    import openvino

    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    graph = openvino.convert_model(encoder, example_input=(ids,))
    compiled, feed = openvino.compile_model(graph, "CPU", settings), [ids.numpy()]
    return lambda: torch.from_numpy(compiled(feed)[0])


def _compiled(encoder: Encoder, ids: Tensor) -> Callable[[], Tensor]:
    call = torch.compile(encoder, dynamic=True)
    return lambda: call(ids)


def _under_plan(encoder: Encoder, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with fk.apply(encoder.model, fk.budget(SLOTS)):
            return call()

    return run


def _compiled_under_plan(encoder: Encoder, ids: Tensor) -> Callable[[], Tensor]:
    encoder = copy.deepcopy(encoder)  # a graph of its own, which no other way makes anew
    return _under_plan(encoder, _compiled(encoder, ids))


def _sum_of_inputs(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> tuple[Tensor, None]:
    return (query + key + value).transpose(1, 2), None


def _without_attention(encoder: Encoder) -> Encoder:
    AttentionInterface.register("sum_of_inputs", _sum_of_inputs)
    encoder = copy.deepcopy(encoder)
    encoder.model.set_attn_implementation("sum_of_inputs")
    return encoder


WAYS: dict[str, Callable[[Encoder, Tensor], Callable[[], Tensor]]] = {
    "torch": lambda encoder, ids: lambda: encoder(ids),
    "torch.compile": lambda encoder, ids: _compiled(copy.deepcopy(encoder), ids),
    "onnxruntime": _by_onnxruntime,
    "openvino": _by_openvino,
    "fewkeys": lambda encoder, ids: _under_plan(encoder, lambda: encoder(ids)),
    "fewkeys.compile": _compiled_under_plan,
    "free": lambda encoder, ids: (lambda free: lambda: free(ids))(_without_attention(encoder)),
    "free.compile": lambda encoder, ids: _compiled(_without_attention(encoder), ids),
}
FREE = ("free", "free.compile")
EXACT = ("torch", "torch.compile", "onnxruntime", "openvino")


@torch.no_grad()
def measure(name: str, batch: int, length: int, left_out: dict[str, str]) -> dict[str, Any]:
    """One shape by all ways that are not left out: milliseconds, and how far outputs are from torch's."""
    torch.compiler.reset()
    model = random_model(name, length + 1, torch.float32)  # a call of all positions would be compiled for its length
    encoder = Encoder(model).eval()
    ids = torch.randint(
        min(KINDS, model.config.vocab_size), (batch, length), generator=torch.Generator().manual_seed(0)
    )
    ways = {way: make(encoder, ids) for way, make in WAYS.items() if way not in left_out}
    expected = ways["torch"]()
    largest = float(expected.abs().max())
    apart = {way: float((run() - expected).abs().max()) / largest for way, run in ways.items() if way not in FREE}
    wrong = [way for way in EXACT if apart.get(way, 0.0) > 1e-3]
    if wrong:
        raise SystemExit(f"{name}, {batch} x {length}: {', '.join(wrong)} is not torch's model: {apart}")
    for way in FREE:
        ways[way]()
    took: dict[str, list[float]] = {way: [] for way in ways}
    start = time.perf_counter()
    while (turns := len(took["torch"])) < FEWEST_TURNS or (
        turns < TURNS and time.perf_counter() - start < ENOUGH_SECONDS
    ):
        for way, run in ways.items():
            time.sleep(PAUSE)
            run()
            before = time.perf_counter()
            run()
            took[way].append(1000 * (time.perf_counter() - before))
    ms = {way: median(times) for way, times in took.items()}
    free = min(ms.pop(way) for way in FREE)
    best = min((way for way in EXACT if way in ms), key=ms.__getitem__)
    ours = min(ms["fewkeys"], ms.get("fewkeys.compile", ms["fewkeys"]))
    row = {"model": name, "batch": batch, "length": length, "turns": len(took["torch"]), "ms": ms, "apart": apart}
    rates = {"ratio": ms[best] / ours, "ceiling": ms[best] / free}
    return row | {"best_engine": best, **rates, "left_out": left_out}


def _left_out(name: str, batch: int, length: int, rows: list[dict[str, Any]]) -> dict[str, str]:
    """The ways that would take too long or too much memory here, with the reason."""
    reasons: dict[str, str] = {}
    for row in rows:  # in order of length: the last one that has a way says what it takes
        if (row["model"], row["batch"]) == (name, batch) and row["length"] < length:
            for way, ms in row["ms"].items():
                reasons.pop(way, None)
                if ms * (length / row["length"]) ** 2 > 1000 * LONGEST:
                    reasons[way] = f"more than {LONGEST:.0f} s a call"
    if batch * HEADS * length**2 * 4 > SCORES:
        reasons["onnxruntime"] = "holds all scores"
    return reasons


LOOKS = {
    "torch": Look("#000000", "-", 1.8, "D"),
    "torch.compile": Look("#4d4d4d", "--"),
    "onnxruntime": Look("#b15928"),
    "openvino": Look("#2c7fb8"),
    "fewkeys": Look("#009e73", "-", 3.4),
    "fewkeys.compile": Look("#009e73", "--"),
}


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Milliseconds of a call against the length of one sequence, a panel for each model."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = sheet(
        "Whole encoders on a CPU",
        f"budget({SLOTS}), float32",
        columns=len(names),
        size=(3.7, 3.4),
        names=1.9,
    )
    for axes, name in zip(panels, names, strict=True):
        single = [row for row in rows if (row["model"], row["batch"]) == (name, 1)]
        ends = {}
        for way, look in LOOKS.items():
            points = [(row["length"], row["ms"][way]) for row in single if way in row["ms"]]
            draw(axes, *zip(*points, strict=True), look)
            ends[way] = points[-1]
        say(axes, "tokens", "ms a call", name)
        lengths = [row["length"] for row in single]
        logarithmic(axes, "x", lengths, lengths)
        logarithmic(axes, "y", [ms for row in single for ms in row["ms"].values()])
        name_lines(axes, ends, LOOKS)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), metavar="NAME,...")
    parser.add_argument("--lengths", type=int, nargs="+", default=sorted({length for _, length in SHAPES}))
    args = parser.parse_args()
    torch._inductor.config.freezing = True  # as an option of `torch.compile` it has no effect on linear layers
    path = RESULTS / "engines.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.is_file() else []
    for name in args.models.split(","):
        for batch, length in SHAPES:
            left_out = _left_out(name, batch, length, rows)
            if length in args.lengths and "torch" not in left_out:
                row = measure(name, batch, length, left_out)
                print(json.dumps(row), flush=True)
                others = [old for old in rows if (old["model"], old["batch"], old["length"]) != (name, batch, length)]
                rows = sorted([*others, row], key=lambda one: (MODELS.index(one["model"]), one["batch"], one["length"]))
                result = {"plan": f"budget({SLOTS})", "rows": rows}
                about = {"machine": machine(), "versions": versions()}
                write_whole(path, json.dumps(about | result, indent=1) + "\n")
                gc.collect()
    picture(rows, RESULTS / "engines.png")


if __name__ == "__main__":
    main()
